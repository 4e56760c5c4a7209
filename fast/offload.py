"""AdamW's moments in the CPU's memory while vLLM is awake (actor.optimizer_offload).

They are 8 bytes a parameter of this GPU's shard, which the KV cache may have instead. The float32 weights stay: the
sync reads them. A moment's storage is emptied and filled again, so that every tensor stays the object it is.
"""

import torch

from batch import ceil_div

ALIGNMENT = 512  # bytes


class Moments:
    """Where the moments of an optimizer are: on the device, or in one flat host buffer."""

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device):
        self.optimizer = optimizer
        self.device = device
        self.host: torch.Tensor | None = None
        self.away: list[tuple[torch.UntypedStorage, torch.Tensor]] = []  # an emptied storage, and its bytes

    def storages(self) -> list[torch.UntypedStorage]:
        """The moments' storages that hold anything, each once. A rank may hold no row of a small parameter."""
        found: dict[int, torch.UntypedStorage] = {}
        for state in self.optimizer.state.values():
            for name, tensor in state.items():
                if name != "step":
                    storage = getattr(
                        tensor, "_local_tensor", tensor
                    ).untyped_storage()  # of a DTensor, this rank's shard
                    found[storage.data_ptr()] = storage
        return [storage for storage in found.values() if storage.nbytes()]

    @torch.no_grad()
    def offload(self) -> None:
        """To the host. Before the first step there are no moments."""
        storages = self.storages()
        if self.away or not storages:
            return
        starts = [0]
        for storage in storages:
            starts.append(starts[-1] + ceil_div(storage.nbytes(), ALIGNMENT) * ALIGNMENT)
        if self.host is None or len(self.host) != starts[-1]:
            self.host = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        for storage, start in zip(storages, starts):
            held = self.host[start : start + storage.nbytes()]
            held.copy_(self.bytes_of(storage), non_blocking=True)
            self.away.append((storage, held))
        if self.device.type == "cuda":
            torch.cuda.synchronize()  # the copies are done before anything else gets the memory
        for storage, _ in self.away:
            storage.resize_(0)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # vLLM takes only what torch has given back

    @torch.no_grad()
    def load(self) -> None:
        """Back to the device, if they are away."""
        for storage, held in self.away:
            storage.resize_(len(held))
            self.bytes_of(storage).copy_(held, non_blocking=True)
        self.away = []

    def bytes_of(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """A storage as a tensor of bytes, sharing its memory."""
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)
