"""Blockwise quantisation on the CPU, by quantize.cpp."""

from __future__ import annotations

from typing import Any

import torch

from shardlib.kernels.common import native
from shardlib.kernels.common.thresholds import threads
from shardlib.kernels.quantize.blockwise import Blockwise

_SIGNATURES = {
    "quantize": "pipillppi",
    "dequantize_sum": "pplillpii",
    "dequantize_sum_quantize": "pplipillppi",
}


def load(device: torch.device) -> str:
    return native.description("quantize")


def quantize(
    x: torch.Tensor, form: Blockwise, error: torch.Tensor | None, values: torch.Tensor, scales: torch.Tensor
) -> None:
    x = native.readable(x)
    where = (form.bits, form.block, len(x), values, scales, threads())
    _library().quantize(x, native.DTYPES[x.dtype], error, *where)


def dequantize_sum(values: torch.Tensor, scales: torch.Tensor, form: Blockwise, out: torch.Tensor) -> None:
    if out.dtype == torch.float16:
        total = torch.empty(len(out))
        dequantize_sum(values, scales, form, total)
        out.copy_(total)
        return
    where = (form.bits, form.block, len(out), out, native.DTYPES[out.dtype], threads())
    _library().dequantize_sum(values, scales, len(values), *where)


def dequantize_sum_quantize(
    values: torch.Tensor,
    scales: torch.Tensor,
    form: Blockwise,
    elements: int,
    out_form: Blockwise,
    error: torch.Tensor | None,
    out_values: torch.Tensor,
    out_scales: torch.Tensor,
) -> None:
    where = (out_form.bits, form.block, elements, out_values, out_scales, threads())
    _library().dequantize_sum_quantize(values, scales, len(values), form.bits, error, *where)


def _library() -> Any:
    return native.cpp_functions("quantize", _SIGNATURES)
