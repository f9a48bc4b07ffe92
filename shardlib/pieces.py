"""Large tensors in pieces that stay in a core's cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

# Elements that are taken through a chain of operations at once, so that memory is passed over once however long the chain
# is. (On two cores with 2 MB of cache each: half as many cost 5 % more in calls, an eighth as many half as much again.)
_PIECE = 1 << 16


def pieces(tensors: Sequence[torch.Tensor]) -> Iterable[Sequence[torch.Tensor]]:
    """Tensors of one shape as views of the same elements of each; one piece on a GPU, or of what is not contiguous."""
    first = tensors[0]
    if first.device.type == "cpu" and first.numel() > _PIECE and all(tensor.is_contiguous() for tensor in tensors):
        return zip(*(tensor.view(-1).split(_PIECE) for tensor in tensors), strict=True)
    return [tensors]
