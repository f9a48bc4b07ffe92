"""Sizes above which work is cut, or goes another way: named where they are asked, and small all at once for tests.

What begins above a size is otherwise met by users alone, since tests are small.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

_largest: int | None = None


class Threshold:
    """A size that code compares with, or cuts by: ``LIMIT = Threshold(1 << 24)``, and then ``count > LIMIT()``."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __call__(self) -> int:
        return self._size if _largest is None else min(self._size, _largest)


@contextlib.contextmanager
def small(largest: int) -> Iterator[None]:
    """Within, no threshold of the process is above ``largest``, and compiled kernels use all threads at any size."""
    global _largest
    before, _largest = _largest, largest
    try:
        yield
    finally:
        _largest = before


def threads() -> int:
    """What compiled kernels are told of threads: torch's number, negative where small work is to be cut too."""
    return torch.get_num_threads() if _largest is None else -torch.get_num_threads()
