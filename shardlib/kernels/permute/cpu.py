"""Permutation of rows on the CPU, by permute.cpp."""

from __future__ import annotations

from typing import Any

import torch

from shardlib.common.thresholds import threads
from shardlib.kernels.common import native, results

_SIGNATURES = {"permute": "plpllllppi", "unpermute": "pipplllpli", "unpermute_backward": "ppippllllpppi"}


def load(device: torch.device) -> str:
    return native.description("permute")


def permute(x: torch.Tensor, positions: torch.Tensor, count: int) -> torch.Tensor:
    x, out = x.contiguous(), results.empty(x, (count, x.shape[1]))
    sizes = (*positions.shape, x.shape[1], count)
    _library().permute(x, x.element_size(), positions.contiguous(), *sizes, out, _filled(count), threads())
    return out


def unpermute(rows: torch.Tensor, positions: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    rows, y = rows.contiguous(), results.empty(rows, (len(positions), rows.shape[1]))
    given = (rows, native.DTYPES[rows.dtype], positions.contiguous(), native.floats(weights))
    _library().unpermute(*given, *positions.shape, rows.shape[1], y, len(rows), threads())
    return y


def backward(
    rows: torch.Tensor, positions: torch.Tensor, weights: torch.Tensor, dy: torch.Tensor
) -> list[torch.Tensor]:
    rows, drows = rows.contiguous(), results.like(rows)
    dweights = torch.empty(weights.shape)
    given = (dy.contiguous(), rows, native.DTYPES[rows.dtype], positions.contiguous(), native.floats(weights))
    made = (drows, dweights, _filled(len(rows)), threads())
    _library().unpermute_backward(*given, *positions.shape, *rows.shape[::-1], *made)
    return [drows, dweights]


def _filled(count: int) -> torch.Tensor:
    """Whether each row has an assignment, for the kernel to note."""
    return torch.zeros(count, dtype=torch.uint8)


def _library() -> Any:
    return native.cpp_functions("permute", _SIGNATURES)
