"""Products of few rows in plain torch, which makes a quantised matrix whole first; and of ranges of rows, by expert."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from shardlib.kernels.common import results
from shardlib.kernels.grouped_matmul.reference import ranges
from shardlib.kernels.quantize import dequantize
from shardlib.kernels.thin_matmul.arguments import Matrix


def load(device: torch.device) -> str:
    return "reference"


def product(x: torch.Tensor, weight: torch.Tensor | Matrix, bias: torch.Tensor | None) -> torch.Tensor:
    return F.linear(x, whole(weight) if isinstance(weight, Matrix) else weight, bias)


def grouped(x: torch.Tensor, weight: Matrix, ends: torch.Tensor) -> torch.Tensor:
    y = results.empty(x, (len(x), weight.shape[1]))
    parts = ranges(ends, len(x))
    for expert, (first, end) in enumerate(parts):
        if first < end:
            y[first:end] = product(x[first:end], weight[expert], None)
    y[parts[-1][1] :] = 0
    return y


def whole(weight: Matrix) -> torch.Tensor:
    """The weight that the values stand for."""
    flat = dequantize(weight.values, weight.scales, weight.form, weight.shape.numel())
    return flat.view(weight.shape).to(weight.dtype)
