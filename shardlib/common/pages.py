"""Host memory in pages of its own, which an accelerator may copy from and to beside other work."""

from __future__ import annotations

import mmap
import sys
from typing import Any

import torch

_PORTABLE = 1  # pinned for every device of the process


def pages(size: int, pinned: bool) -> torch.Tensor:
    """``size`` zeros in host memory, bytes that begin at a page; ``pinned`` for copies of this process's accelerator.

    Torch's allocator of pinned memory rounds up to powers of two, which for large buffers is up to twice what a plan says. So
    pages are pinned after their allocation, where the accelerator has the call for it.

    Raises:
        MemoryError: the system does not pin as much.
    """
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    accelerator = torch.accelerator.current_accelerator() if pinned else None
    runtime = getattr(torch.get_device_module(accelerator), "cudart", None) if accelerator else None
    if accelerator and runtime is None:
        return torch.zeros(size, dtype=torch.uint8, pin_memory=True)
    held = _Pages(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = torch.frombuffer(held, dtype=torch.uint8)[:size]
    if runtime is not None:
        held.pin(runtime(), memory.data_ptr(), size)
    return memory


def cloned(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in memory of its own, of the same kind."""
    return alike(tensor).copy_(tensor) if _pinned(tensor) else tensor.clone()


def alike(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape and dtype in memory of its own, of the same kind. It has no values yet."""
    if not _pinned(tensor):
        return torch.empty_like(tensor)
    return pages(tensor.numel() * tensor.itemsize, pinned=True).view(tensor.dtype).view(tensor.shape)


def _pinned(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_pinned()


class _Pages(mmap.mmap):
    """Pages that stay pinned until they are given back."""

    _runtime: Any = None

    def pin(self, runtime: Any, address: int, size: int) -> None:
        if failure := int(runtime.cudaHostRegister(address, size, _PORTABLE)):
            raise MemoryError(
                f"{size:,} bytes of host memory could not be pinned (error {failure}): the system allows less; raise the "
                "limit of locked memory (ulimit -l), or keep less in host memory (offload(fraction=...))"
            )
        self._runtime, self._address = runtime, address

    def __del__(self) -> None:
        # The memory goes back when this returns, so no copy may be under way.
        if self._runtime is not None and not sys.is_finalizing():
            torch.accelerator.synchronize()
            self._runtime.cudaHostUnregister(self._address)
