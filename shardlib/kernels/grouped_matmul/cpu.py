"""Products by expert on the CPU: of bf16 by grouped_matmul.cpp where there are AMX tiles, else as in plain torch."""

from __future__ import annotations

from typing import Any

import torch

from shardlib.common.thresholds import threads
from shardlib.kernels.common import native, results
from shardlib.kernels.common import rows as lines
from shardlib.kernels.grouped_matmul import reference

_MATRICES, _SIZES = "plli", "pllll"
_SIGNATURES = {
    "grouped_matmul": f"pl{_MATRICES}{_SIZES}pppi",
    "grouped_matmul_backward": f"ppl{_MATRICES}{_SIZES}pppi",
    "grouped_matmul_room": "p",
}


def load(device: torch.device) -> str:
    described = native.description("grouped_matmul")
    if _has_tiles():
        return f"{described} for bf16, torch's products for other dtypes"
    return f"torch's products (bf16 has a kernel for AMX tiles: {described})"


def forward(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if not _tiled(x):
        return reference.forward(x, weight, offsets, bias)
    reference.ranges(offsets, len(x))
    y = results.empty(x, (len(x), weight.shape[1]))
    bias = None if bias is None else bias.contiguous()
    factors = (*lines.strided(x), *_matrices(weight), *_sizes(weight, offsets, x))
    _library().grouped_matmul(*factors, bias, y, *_scratch())
    return y


def backward(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    if not _tiled(x):
        return reference.backward(x, weight, offsets, dy)
    reference.ranges(offsets, len(x))
    gradients = [results.like(x), results.like(weight)]
    factors = (dy.contiguous(), *lines.strided(x), *_matrices(weight))
    _library().grouped_matmul_backward(*factors, *_sizes(weight, offsets, x), *gradients, *_scratch())
    return gradients


def _has_tiles() -> bool:
    return native.instruction_set("grouped_matmul") == "amx"


def _tiled(x: torch.Tensor) -> bool:
    return x.dtype == torch.bfloat16 and _has_tiles()


def _matrices(weight: torch.Tensor) -> tuple[torch.Tensor, int, int, int]:
    """The matrices with the distances of two of them and of a matrix's lines, and whether rows lie side by side, or columns.

    A transposed weight is not copied: models have either.
    """
    along = weight.stride(2) == 1
    if not along and weight.stride(1) != 1:
        weight, along = weight.contiguous(), True
    return weight, weight.stride(0), weight.stride(1 if along else 2), int(along)


def _sizes(weight: torch.Tensor, offsets: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, int, int, int, int]:
    experts, outer, inner = weight.shape
    return offsets.contiguous(), experts, len(x), inner, outer


def _scratch() -> tuple[torch.Tensor, int]:
    """Memory for each thread, and the number of threads."""
    room = torch.empty(1, dtype=torch.int64)
    _library().grouped_matmul_room(room)
    return torch.empty(abs(threads()), int(room), dtype=torch.int32), threads()


def _library() -> Any:
    return native.cpp_functions("grouped_matmul", _SIGNATURES)
