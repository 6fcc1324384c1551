"""The memory of all tensors that operations make."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Live(TorchDispatchMode):
    """Counts the bytes of all storages that operations make, while they live."""

    def __init__(self, *known: torch.Tensor) -> None:
        super().__init__()
        self._seen: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        for tensor in known:
            self._add(tensor)
        self.now = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._add(leaf)
        return result

    def _add(self, tensor):
        storage = tensor.untyped_storage()
        key, size = id(storage), storage.nbytes()
        if key in self._seen:
            return
        self.now = getattr(self, "now", 0) + size
        self.peak = max(getattr(self, "peak", 0), self.now)

        def gone(_):
            self.now -= size
            del self._seen[key]

        self._seen[key] = weakref.ref(storage, gone)
