"""SwiGLU on the CPU, by swiglu.cpp."""

from __future__ import annotations

from typing import Any

import torch

from shardlib.common.thresholds import threads
from shardlib.kernels.common import native, results, rows

_SIGNATURES = {"swiglu": "plplillpi", "swiglu_backward": "plplipllppi"}


def load(device: torch.device) -> str:
    return native.description("swiglu")


def forward(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    inputs = _strided(gate, up)
    y = results.like(inputs[0])
    _library().swiglu(*inputs, native.DTYPES[y.dtype], *rows.sizes(y), y, threads())
    return y


def backward(gate: torch.Tensor, up: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    inputs, dy = _strided(gate, up), native.readable(dy)
    gradients = [results.like(dy), results.like(dy)]
    where = (native.DTYPES[dy.dtype], dy, *rows.sizes(dy), *gradients, threads())
    _library().swiglu_backward(*inputs, *where)
    return gradients


def _strided(*tensors: torch.Tensor) -> tuple[Any, ...]:
    """Each tensor as fp32 or bf16, followed by the distance of its rows."""
    read = [tensor.float() if tensor.dtype == torch.float16 else tensor for tensor in tensors]
    return tuple(value for tensor in read for value in rows.strided(tensor))


def _library() -> Any:
    return native.cpp_functions("swiglu", _SIGNATURES)
