"""Blockwise quantisation on NVIDIA GPUs, by quantize.cu."""

from __future__ import annotations

from typing import Any

import torch

from shardlib.kernels.common import native
from shardlib.kernels.quantize.arguments import Quantized

_SIGNATURES = {
    "quantize": "pipillppp",
    "dequantize_sum": "pplillpip",
    "dequantize_sum_quantize": "pplipillppp",
}


def load(device: torch.device) -> str:
    _library()
    return "CUDA C++"


def quantize(x: torch.Tensor, residual: torch.Tensor | None, out: Quantized) -> None:
    x = native.readable(x)
    values, scales, form = out
    where = (form.bits, form.block, len(x), values, scales, native.stream(x.device))
    _library().quantize(x, native.DTYPES[x.dtype], residual, *where)


def dequantize_sum(sent: Quantized, out: torch.Tensor) -> None:
    if out.dtype == torch.float16:
        total = torch.empty(len(out), device=out.device)
        dequantize_sum(sent, total)
        out.copy_(total)
        return
    values, scales, form = sent
    where = (form.bits, form.block, len(out), out, native.DTYPES[out.dtype], native.stream(out.device))
    _library().dequantize_sum(values, scales, len(values), *where)


def dequantize_sum_quantize(sent: Quantized, elements: int, residual: torch.Tensor | None, out: Quantized) -> None:
    values, scales, form = sent
    where = (out.form.bits, form.block, elements, out.values, out.scales, native.stream(values.device))
    _library().dequantize_sum_quantize(values, scales, len(values), form.bits, residual, *where)


def _library() -> Any:
    return native.cuda_functions("quantize", _SIGNATURES)
