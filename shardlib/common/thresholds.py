"""Sizes from which code takes another path or splits its work, which tests make small; large tensors chunk by chunk."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import torch

# Sizes from which code takes another path or splits its work. Tests make all of them small at once.
# Tests use small tensors, so without this only users would reach the paths for large ones.


_limits: list[int] = []  # of the contexts that are open, in the order in which they began


class Threshold:
    """A size that code compares with, or splits by: ``LIMIT = Threshold(1 << 24)``, then ``count > LIMIT()``."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __call__(self) -> int:
        return min(self._size, _limits[-1]) if _limits else self._size


@contextlib.contextmanager
def small(largest: int) -> Iterator[None]:
    """A context in which no threshold of the process exceeds ``largest``, and compiled kernels use all threads. Those of
    several threads may end in any order."""
    _limits.append(largest)
    try:
        yield
    finally:
        _limits.remove(largest)


def threads() -> int:
    """The number of threads to pass to compiled kernels: torch's, negated to split work of any size."""
    return -torch.get_num_threads() if _limits else torch.get_num_threads()


# Large tensors a chunk at a time, so that intermediate results stay small.


# The elements of a chunk. On a CPU a chunk stays in a core's cache, so that a chain of operations, however long, reads memory
# once. (On two cores with 2 MB of cache each, chunks of half the size cost 5 % more in calls, of an eighth 50 % more.) On
# other devices a chunk bounds the memory of intermediate results: 128 MB for numbers of 8 bytes.
_IN_CACHE, _IN_MEMORY = Threshold(1 << 16), Threshold(1 << 24)


def chunks(tensors: Sequence[torch.Tensor]) -> Iterable[Sequence[torch.Tensor]]:
    """Flat views of the same elements of each of several tensors of one shape; the tensors themselves unless all are
    contiguous."""
    first = tensors[0]
    size = (_IN_CACHE if first.device.type == "cpu" else _IN_MEMORY)()
    if first.numel() > size and all(tensor.is_contiguous() for tensor in tensors):
        return zip(*(tensor.view(-1).split(size) for tensor in tensors), strict=True)
    return [tensors]
