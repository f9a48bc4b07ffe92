"""Blockwise quantisation on the CPU, by quantize.cpp."""

from __future__ import annotations

from typing import Any

import torch

from shardlib.common.thresholds import threads
from shardlib.kernels.common import native
from shardlib.kernels.quantize.arguments import Quantized

_SIGNATURES = {
    "quantize": "pipillppi",
    "dequantize_sum": "pplillpii",
    "dequantize_sum_quantize": "pplipillppi",
}


def load(device: torch.device) -> str:
    return native.description("quantize")


def quantize(x: torch.Tensor, residual: torch.Tensor | None, out: Quantized) -> None:
    x = native.readable(x)
    values, scales, form = out
    where = (form.bits, form.block, len(x), values, scales, threads())
    _library().quantize(x, native.DTYPES[x.dtype], residual, *where)


def dequantize_sum(sent: Quantized, out: torch.Tensor) -> None:
    if out.dtype == torch.float16:
        total = torch.empty(len(out))
        dequantize_sum(sent, total)
        out.copy_(total)
        return
    values, scales, form = sent
    where = (form.bits, form.block, len(out), out, native.DTYPES[out.dtype], threads())
    _library().dequantize_sum(values, scales, len(values), *where)


def dequantize_sum_quantize(sent: Quantized, elements: int, residual: torch.Tensor | None, out: Quantized) -> None:
    values, scales, form = sent
    where = (out.form.bits, form.block, elements, out.values, out.scales, threads())
    _library().dequantize_sum_quantize(values, scales, len(values), form.bits, residual, *where)


def _library() -> Any:
    return native.cpp_functions("quantize", _SIGNATURES)
