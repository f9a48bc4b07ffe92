"""Products of few rows on the CPU, by thin_matmul.cpp."""

from __future__ import annotations

from typing import Any

import torch

from shardlib.kernels.common import native
from shardlib.kernels.common.thresholds import Threshold, threads
from shardlib.kernels.thin_matmul import reference
from shardlib.kernels.thin_matmul.arguments import Matrix
from shardlib.kernels.thin_matmul.line import line, lines

_SIGNATURES = {"thin_matmul": "pilppi"}
FEW = Threshold(32)  # rows that meet a weight at a time


def load(device: torch.device) -> str:
    return native.description("thin_matmul")


def product(x: torch.Tensor, weight: torch.Tensor | Matrix, bias: torch.Tensor | None) -> torch.Tensor:
    outputs, inputs = weight.shape
    rows = x.reshape(-1, inputs)
    few = len(rows) <= FEW()
    served = x.dtype != torch.float16
    if isinstance(weight, torch.Tensor):
        served = served and few and weight.is_contiguous()
    if not served:
        return reference.product(x, weight, bias)
    rows, y = rows.contiguous(), x.new_empty(len(rows), outputs)
    matrix = lines(line(weight, None if bias is None else bias.contiguous()))
    for part, out in [(rows, y)] if few else zip(rows.split(FEW()), y.split(FEW())):
        _library().thin_matmul(part, native.DTYPES[x.dtype], len(part), matrix, out, threads())
    return y.view(*x.shape[:-1], outputs)


def _library() -> Any:
    return native.cpp_functions("thin_matmul", _SIGNATURES)
