"""A sync's way into vLLM (sync.replay_copies): the copies that vLLM's loader makes are noted once and made again later.

sync_weights.py proves by the bits that the weights arrived, whichever way they took.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sync_weights import batches

Weight = tuple[str, torch.Tensor]  # Hugging Face's name, and the tensor


class Copies(TorchDispatchMode):
    """Where each streamed tensor lands in vLLM.

    Noted while vLLM's own code loads a stream, which takes 0.1 ms of Python a tensor, and done again at later syncs in
    a few calls. Where vLLM's code does anything but copy parts of the tensors, as they come, into parameters, it loads
    every stream. What vLLM does once weights are loaded (`finish`) is left out at later syncs when it had nothing to do
    with a parameter and wrote only to buffers, which vLLM keeps over a sleep. The bits are compared either way.
    """

    def __init__(self):
        super().__init__()
        # Names of vLLM's parameters by where they are. When one has moved, everything is noted anew.
        self.parameters: dict[int, str] = {}
        self.buffers: set[int] = set()  # where vLLM's buffers are
        # By a streamed tensor's form, each part that is copied: the parameter's name, its slice, and the part's size,
        # stride and offset in the tensor.
        self.places: dict[tuple, list[tuple]] = {}
        self.only_copies = True
        self.finish_again = True
        # While noting: the tensor that vLLM's loader works on, `nothing` before the first and after the last of them;
        # None while the actor's code runs.
        self.nothing: Weight = ("", torch.empty(0))
        self.tensor: Weight | None = None
        self.finishing = False

    def load(self, model: torch.nn.Module, weights: Iterable[Weight], finish: Callable[[], None]) -> set[str]:
        """Load a stream; returns vLLM's names of what was written. `finish`: what vLLM does once they are loaded."""
        parameters = {where(p): name for name, p in model.named_parameters()}
        if parameters == self.parameters and self.only_copies:
            return self.load_again(model, weights, finish)
        if parameters == self.parameters:
            loaded = model.load_weights(weights)
            finish()
            return loaded
        return self.load_and_note(model, weights, finish, parameters)

    def load_and_note(self, model, weights: Iterable[Weight], finish, parameters: dict[int, str]) -> set[str]:
        """Let vLLM load a stream, and note what it does."""
        none_shared = len(parameters) == len(dict(model.named_parameters()))  # no two parameters share memory
        self.parameters = parameters
        self.buffers = {where(buffer) for buffer in model.buffers()}
        self.places = {}
        self.only_copies = none_shared
        self.finish_again = False
        self.tensor = self.nothing
        with self:
            loaded = model.load_weights(self.noted(weights))
            self.finishing = True
            finish()
        self.finishing = False
        written = {name for parts in self.places.values() for name, *_ in parts}
        self.only_copies = self.only_copies and written == loaded & set(parameters.values())
        return loaded

    def noted(self, weights: Iterable[Weight]) -> Iterator[Weight]:
        """The stream, with `tensor` saying whose code runs: the actor's until the next tensor is there, then vLLM's."""
        weights = iter(weights)
        while True:
            self.tensor = None
            weight = next(weights, None)
            self.tensor = weight or self.nothing
            if weight is None:
                return
            yield weight

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        """Every operation of torch while a stream is noted comes by here."""
        result = func(*args, **(kwargs or {}))
        if self.finishing or self.tensor:  # else it is the actor's, perhaps on tensors without memory, such as shards
            given = [where(x) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            # Where a vocabulary needs no padding, vLLM fills an empty tensor.
            fills_nothing = func is torch.ops.aten.fill_.Scalar and args[0].numel() == 0
            changes = func._schema.is_mutable and not fills_nothing
            if self.finishing:
                self.note_finish(given, changes)
            else:
                self.note_load(func, args, given, changes, result)
        return result

    def note_finish(self, given: list[int], changes: bool) -> None:
        """An operation of `finish`, on tensors that are at `given`."""
        on_parameter = any(place in self.parameters for place in given)
        beside_buffers = changes and any(place not in self.buffers for place in given[:1])
        self.finish_again |= on_parameter or beside_buffers

    def note_load(self, func, args: tuple, given: list[int], changes: bool, result) -> None:
        """An operation of vLLM's loader, on tensors that are at `given`."""
        whole = self.tensor[1]
        if func is torch.ops.aten.copy_.default and given[0] in self.parameters and given[1] == where(whole):
            into, part = args[:2]
            offset = part.storage_offset() - whole.storage_offset()
            copied = self.parameters[given[0]], into, part.size(), part.stride(), offset
            self.places.setdefault(form(*self.tensor), []).append(copied)
            return
        made_anew = isinstance(result, torch.Tensor) and where(result) not in given  # not a part of a tensor
        made_of_it = made_anew and where(whole) in given
        if changes or made_of_it:
            self.only_copies = False

    @torch.no_grad()
    def load_again(self, model, weights: Iterable[Weight], finish: Callable[[], None]) -> set[str]:
        """Load a stream by the copies that were noted."""
        loaded: set[str] = set()
        finish_again = self.finish_again
        for batch in batches(weights, lambda weight: weight[1].numel()):
            unknown = [weight for weight in batch if form(*weight) not in self.places]
            if unknown:
                loaded |= model.load_weights(unknown)
                finish_again = True
            loaded |= self.copy_parts(batch)
            del batch, unknown  # before the next tensors are there
        if finish_again:
            finish()
        return loaded

    def copy_parts(self, batch: list[Weight]) -> set[str]:
        """Copy the known parts of these tensors, all in one call. Returns the names of the parameters."""
        targets = []
        sources = []
        names = set()
        for name, tensor in batch:
            for parameter, into, size, stride, offset in self.places.get(form(name, tensor), ()):
                targets.append(into)
                sources.append(tensor.as_strided(size, stride, tensor.storage_offset() + offset))
                names.add(parameter)
        if targets:
            torch._foreach_copy_(targets, sources)
        return names


def where(tensor: torch.Tensor) -> int:
    """The address of a tensor's memory."""
    return tensor.untyped_storage().data_ptr()


def form(name: str, tensor: torch.Tensor) -> tuple:
    """What tells a streamed tensor from others, and from itself in another layout."""
    return name, tensor.shape, tensor.stride(), tensor.dtype
