"""1-bit compression on NVIDIA GPUs, by onebit.cu."""

from __future__ import annotations

from typing import Any

import torch

from shardlib.kernels.common import native
from shardlib.kernels.onebit.segments import Segments

_TILE = 2048  # as in onebit.cuh
_SIGNATURES = {
    "onebit_compress": "pipppllllpppp",
    "onebit_average": "pplppllllpp",
    "onebit_average_compress": "pplpppllllpppp",
}


def load(device: torch.device) -> str:
    _library()
    return "CUDA C++"


def compress(x: torch.Tensor, residual: torch.Tensor, segments: Segments) -> tuple[torch.Tensor, torch.Tensor]:
    x = native.readable(x)
    outputs = _outputs(segments, x.device)
    table = _table(segments, x.device)
    _library().onebit_compress(x, native.DTYPES[x.dtype], residual, *table, *outputs, native.stream(x.device))
    return outputs[:2]


def average(bits: torch.Tensor, scales: torch.Tensor, segments: Segments, out: torch.Tensor) -> None:
    table = _table(segments, out.device)
    _library().onebit_average(bits, scales, len(bits), *table, out, native.stream(out.device))


def average_compress(
    bits: torch.Tensor, scales: torch.Tensor, residual: torch.Tensor, segments: Segments
) -> tuple[torch.Tensor, torch.Tensor]:
    outputs = _outputs(segments, residual.device)
    table = _table(segments, residual.device)
    _library().onebit_average_compress(
        bits, scales, len(bits), residual, *table, *outputs, native.stream(residual.device)
    )
    return outputs[:2]


def _library() -> Any:
    return native.cuda_functions("onebit", _SIGNATURES)


def _in_one_pass(segments: Segments) -> bool:
    return segments.block is not None and segments.block % 32 == 0 and segments.block <= 4096


def _outputs(segments: Segments, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Empty tensors for signs, scales, and the sums over each segment's elements in a tile."""
    sums = 0 if _in_one_pass(segments) else -(-segments.length // _TILE) + segments.count
    return (
        torch.empty(segments.bytes, dtype=torch.uint8, device=device),
        torch.empty(segments.count, device=device),
        torch.empty(sums, dtype=torch.float64, device=device),
    )


def _table(segments: Segments, device: torch.device) -> tuple[torch.Tensor | int | None, ...]:
    """The arguments by which the C functions take ``segments``."""
    sizes = (segments.count, segments.elements, segments.length)
    if _in_one_pass(segments):
        return None, None, segments.block, *sizes
    return segments.on(device), segments.first(_TILE, device), 0, *sizes
