"""The device that a process computes on, and host memory in pages of its own, which it may copy beside other work."""

from __future__ import annotations

import mmap
import os
import sys
import weakref
from typing import Any, ClassVar

import torch

# The device that a process computes on, and how its memory is reached.


def default_device() -> torch.device:
    """This process's CUDA device where there is one, else the CPU."""
    return with_index(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def with_index(device: torch.device) -> torch.device:
    """``device`` with the index that its tensors name; where it has none, that of this process on its host.

    That is LOCAL_RANK where the launcher sets it, else the index of torch's current device.
    """
    if _has_index(device) or device.type in ("cpu", "meta"):
        return device
    module, local = torch.get_device_module(device), os.environ.get("LOCAL_RANK")
    return torch.device(device.type, module.current_device() if local is None else int(local) % module.device_count())


def pins(device: torch.device) -> bool:
    """Whether copies between ``device`` and the host go through pinned memory, beside other work."""
    return device.type not in ("cpu", "meta", "mps")


def default_generator(device: torch.device) -> torch.Generator:
    """Torch's own generator of a device."""
    if device.type in ("cpu", "meta"):
        return torch.default_generator
    module = torch.get_device_module(device)
    return module.default_generators[device.index if _has_index(device) else module.current_device()]


def _has_index(device: torch.device) -> bool:
    return ":" in str(device)  # `device.index` is None without one, and typed as a number


# Host memory in pages of its own, which an accelerator may copy from and to beside other work.


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
        _Pages.at[memory.data_ptr()] = held
    return memory


def settle(memory: torch.Tensor) -> None:
    """Note that no copy from or to what `pages` gave is under way, or will be: it goes back without a wait."""
    if (held := _Pages.at.get(memory.data_ptr())) is not None:
        held.settled = True


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

    at: ClassVar[weakref.WeakValueDictionary[int, _Pages]] = (
        weakref.WeakValueDictionary()
    )  # address -> what is pinned there
    settled = False
    _runtime: Any = None
    _device = 0  # whose copies are waited for

    def pin(self, runtime: Any, address: int, size: int) -> None:
        if failure := int(runtime.cudaHostRegister(address, size, _PORTABLE)):
            raise MemoryError(
                f"{size:,} bytes of host memory could not be pinned (error {failure}). Raise the limit (ulimit -l), or keep "
                "less there: offload(fraction=...)"
            )
        self._runtime, self._address, self._device = runtime, address, torch.accelerator.current_device_index()

    def __del__(self) -> None:
        # The memory goes back when this returns, so no copy may be under way.
        if self._runtime is not None and not sys.is_finalizing():
            if not self.settled:
                torch.accelerator.synchronize(self._device)
            self._runtime.cudaHostUnregister(self._address)
