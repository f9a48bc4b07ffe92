"""Sizes from which code takes another path or splits its work. Tests make all of them small at once.

Tests use small tensors, so without this only users would reach the paths for large ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

_largest: int | None = None


class Threshold:
    """A size that code compares with, or splits by: ``LIMIT = Threshold(1 << 24)``, then ``count > LIMIT()``."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __call__(self) -> int:
        return self._size if _largest is None else min(self._size, _largest)


@contextlib.contextmanager
def small(largest: int) -> Iterator[None]:
    """A context in which no threshold of the process exceeds ``largest``, and compiled kernels use all threads."""
    global _largest
    before, _largest = _largest, largest
    try:
        yield
    finally:
        _largest = before


def threads() -> int:
    """The number of threads to pass to compiled kernels: torch's, negated to split work of any size."""
    return torch.get_num_threads() if _largest is None else -torch.get_num_threads()
