"""The streamed weights of a sync, many small tensors at a time: their bits added up, and their way into vLLM noted once and taken again.

sync_weights.py proves by the bits that they arrived, whichever way they took.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sync_weights import batches


class Copies(TorchDispatchMode):
    """Where each streamed tensor lands in vLLM: noted while vLLM's own code loads a stream, and done again at later syncs in a few calls, for that code
    takes 0.1 ms of Python a tensor. Where it does anything but copy parts of the tensors, as they come, into parameters, it loads every stream. What vLLM
    does once weights are loaded is left out when it had nothing to do with a parameter, nor wrote what vLLM does not keep over a sleep. The bits are compared either way."""

    def __init__(self):
        super().__init__()
        self.parameters: dict[
            int, str
        ] = {}  # names of vLLM's parameters by where they are: when one has moved, all is noted anew
        self.places: dict[
            tuple, list
        ] = {}  # of a streamed tensor's parts: the parameter, its slice, and the part's size, stride and offset
        self.tensor, self.finishing, self.only_copies, self.finish_again = None, False, True, True
        self.nothing, self.buffers = ("", torch.empty(0)), set()

    def load(self, model, weights, finish) -> set[str]:
        """vLLM's names of what was written. `finish` is what vLLM does once weights are loaded."""
        parameters = {where(p): name for name, p in model.named_parameters()}
        if parameters == self.parameters and self.only_copies:
            return self.load_again(model, weights, finish)
        if parameters == self.parameters:
            loaded = model.load_weights(weights)
            finish()
            return loaded
        alone = len(parameters) == len(dict(model.named_parameters()))  # no two share memory
        self.parameters, self.places, self.only_copies, self.finish_again, self.tensor = (
            parameters,
            {},
            alone,
            False,
            self.nothing,
        )
        self.buffers = {where(buffer) for buffer in model.buffers()}
        with self:
            loaded = model.load_weights(self.noted(weights))
            self.finishing = True
            finish()
        self.finishing = False
        written = {name for parts in self.places.values() for name, *_ in parts}
        self.only_copies = self.only_copies and written == loaded & set(parameters.values())
        return loaded

    def noted(self, weights):
        weights = iter(weights)
        while True:
            self.tensor = None  # what happens until the next one is there is the actor's, all else vLLM's
            weight = next(weights, None)
            self.tensor = weight or self.nothing
            if weight is None:
                return
            yield weight

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if (
            not self.tensor and not self.finishing
        ):  # the actor's, which may be of tensors that are nowhere, such as shards
            return result
        given = [where(x) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        changes = func._schema.is_mutable and not (
            func is torch.ops.aten.fill_.Scalar and args[0].numel() == 0
        )  # an empty fill_ is of a vocabulary that needs no padding
        if self.finishing:
            self.finish_again |= any(place in self.parameters for place in given) or (
                changes and any(place not in self.buffers for place in given[:1])
            )
        elif func is torch.ops.aten.copy_.default and given[0] in self.parameters and given[1] == where(self.tensor[1]):
            (into, part), whole = args[:2], self.tensor[1]
            self.places.setdefault(form(*self.tensor), []).append(
                (
                    self.parameters[given[0]],
                    into,
                    part.size(),
                    part.stride(),
                    part.storage_offset() - whole.storage_offset(),
                )
            )
        else:
            made = (
                isinstance(result, torch.Tensor) and where(result) not in given
            )  # of the tensor something that is no part of it
            self.only_copies &= not changes and not (made and where(self.tensor[1]) in given)
        return result

    @torch.no_grad()
    def load_again(self, model, weights, finish) -> set[str]:
        loaded, finish_again = set(), self.finish_again
        for batch in batches(weights, lambda weight: weight[1].numel()):
            unknown = [weight for weight in batch if form(*weight) not in self.places]
            if unknown:
                loaded, finish_again = loaded | model.load_weights(unknown), True
            parts = [(tensor, *part) for name, tensor in batch for part in self.places.get(form(name, tensor), ())]
            loaded.update(name for _, name, *_ in parts)
            if parts:
                torch._foreach_copy_(
                    [into for _, _, into, *_ in parts],
                    [
                        t.as_strided(size, stride, t.storage_offset() + offset)
                        for t, _, _, size, stride, offset in parts
                    ],
                )
            del batch, unknown, parts  # before the next tensors are there
        if finish_again:
            finish()
        return loaded


def where(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def form(name: str, tensor: torch.Tensor) -> tuple:
    return name, tensor.shape, tensor.stride(), tensor.dtype
