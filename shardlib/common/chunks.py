"""Large tensors a chunk at a time, so that intermediate results stay small."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from shardlib.common.thresholds import Threshold

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
