"""1-bit compression on the CPU, by onebit.cpp."""

from __future__ import annotations

from typing import Any

import torch

from shardlib.common.thresholds import threads
from shardlib.kernels.common import native
from shardlib.kernels.onebit.segments import Segments

_SPAN = 1 << 16  # as in onebit.cpp
_SIGNATURES = {
    "onebit_compress": "pippllllpppi",
    "onebit_average": "pplpllllpi",
    "onebit_average_compress": "pplppllllpppi",
}


def load(device: torch.device) -> str:
    return native.description("onebit")


def compress(x: torch.Tensor, residual: torch.Tensor, segments: Segments) -> tuple[torch.Tensor, torch.Tensor]:
    x = native.readable(x)
    bits, scales, partial = _outputs(segments)
    where = (*_table(segments), bits, scales, partial, threads())
    _library().onebit_compress(x, native.DTYPES[x.dtype], residual, *where)
    return bits, scales


def average(bits: torch.Tensor, scales: torch.Tensor, segments: Segments, out: torch.Tensor) -> None:
    where = (*_table(segments), out, threads())
    _library().onebit_average(bits, scales, len(bits), *where)


def average_compress(
    bits: torch.Tensor, scales: torch.Tensor, residual: torch.Tensor, segments: Segments
) -> tuple[torch.Tensor, torch.Tensor]:
    out_bits, out_scales, partial = _outputs(segments)
    where = (*_table(segments), out_bits, out_scales, partial, threads())
    _library().onebit_average_compress(bits, scales, len(bits), residual, *where)
    return out_bits, out_scales


def _library() -> Any:
    return native.cpp_functions("onebit", _SIGNATURES)


def _outputs(segments: Segments) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Empty tensors for signs, scales, and the sums over each segment's elements in a span."""
    sums = -(-segments.length // _SPAN) + segments.count
    return (
        torch.empty(segments.bytes, dtype=torch.uint8),
        torch.empty(segments.count),
        torch.empty(sums, dtype=torch.float64),
    )


def _table(segments: Segments) -> tuple[torch.Tensor | None, int, int, int, int]:
    """The arguments by which the C functions take ``segments``."""
    offsets = segments.offsets if segments.block is None else None
    return offsets, segments.block or 0, segments.count, segments.elements, segments.length
