"""Memory counted from outside: over storages, by a dispatch mode."""

import weakref

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode


class Live(TorchDispatchMode):
    """Most bytes alive at once, of one device, in storages made under this mode."""

    def __init__(self, device="cpu"):
        super().__init__()
        self.peak = self._now = 0
        self._device, self._known = device, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            # What only pretends to be there (the recording) costs nothing.
            if type(tensor) in (torch.Tensor, nn.Parameter) and tensor.device.type == self._device:
                storage = tensor.untyped_storage()
                if storage._cdata not in self._known:
                    self._known.add(storage._cdata)
                    self._now += storage.nbytes()
                    weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self._now)
        return out

    def _gone(self, key, nbytes):
        self._known.discard(key)
        self._now -= nbytes
