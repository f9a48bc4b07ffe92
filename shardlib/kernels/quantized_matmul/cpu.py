"""Products with a quantised matrix on the CPU, by quantized_matmul.cpp."""

from __future__ import annotations

from typing import Any

import torch

from shardlib.kernels.common import native
from shardlib.kernels.common.thresholds import Threshold, threads
from shardlib.kernels.quantized_matmul import reference
from shardlib.kernels.quantized_matmul.arguments import Matrix

_SIGNATURES = {"quantized_matmul": "pllppillppi"}
_MOST = Threshold(64)  # rows at a time: at most MOST of quantized_matmul.cpp


def load(device: torch.device) -> str:
    return native.description("quantized_matmul")


def product(x: torch.Tensor, weight: Matrix, bias: torch.Tensor | None) -> torch.Tensor:
    if x.dtype == torch.float16:
        return reference.product(x, weight, bias)
    outputs, inputs = weight.shape
    rows = x.reshape(-1, inputs).float().contiguous()
    y, bias = rows.new_empty(len(rows), outputs), native.floats(bias)
    form = (weight.values, weight.scales, weight.form.bits, weight.form.block)
    for part, out in zip(rows.split(_MOST()), y.split(_MOST())):
        _library().quantized_matmul(part, *part.shape, *form, outputs, bias, out, threads())
    return y.to(x.dtype).view(*x.shape[:-1], outputs)


def _library() -> Any:
    return native.cpp_functions("quantized_matmul", _SIGNATURES)
