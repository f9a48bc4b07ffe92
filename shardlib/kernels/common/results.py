"""Memory of kernels' results: large ones on a CPU in huge pages.

The C library gives memory of large results back to the system, which zeroes it anew at the first touch, a page of 4 KB after
the other: of bf16, 32 MB took longer to touch than SwiGLU took to compute. Huge pages are touched a five-hundredth as often.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Callable, Sequence

import torch

from shardlib.common.thresholds import Threshold

_LARGE = Threshold(1 << 22)  # bytes of at least one whole huge page, wherever they begin


def like(x: torch.Tensor) -> torch.Tensor:
    """An empty contiguous tensor of the shape and dtype of ``x``."""
    return empty(x, x.shape)


def empty(x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """An empty contiguous tensor of the dtype and on the device of ``x``."""
    made = x.new_empty(shape)
    size = made.numel() * made.element_size()
    if made.device.type == "cpu" and size >= _LARGE():
        first, last = made.data_ptr(), made.data_ptr() + size
        first, last = first + -first % mmap.PAGESIZE, last - last % mmap.PAGESIZE
        if first < last:
            _advise()(first, last - first)
    return made


@functools.cache
def _advise() -> Callable[[int, int], object]:
    """Asks the system for huge pages at an address. It may refuse: then pages are small."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)  # of Linux
    if advice is None:
        return lambda address, size: None
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return lambda address, size: madvise(address, size, advice)
