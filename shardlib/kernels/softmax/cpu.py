"""Masked softmax on the CPU, by softmax.cpp."""

from __future__ import annotations

from typing import Any

import torch

from shardlib.common.thresholds import threads
from shardlib.kernels.common import native, rows

_SIGNATURES = {"softmax": "pipifllllpi", "softmax_backward": "piiflllppi"}


def load(device: torch.device) -> str:
    return native.description("softmax")


def forward(x: torch.Tensor, lengths: torch.Tensor | None, causal: bool, scale: float) -> torch.Tensor:
    x = native.readable(x)
    y = rows.like(x)
    lengths = None if lengths is None else lengths.contiguous()
    per_sequence = x.shape[1] * x.shape[2]
    where = (x.shape[0] * per_sequence, per_sequence, *x.shape[2:], y, threads())
    _library().softmax(x, native.DTYPES[x.dtype], lengths, causal, scale, *where)
    return y


def backward(y: torch.Tensor, causal: bool, scale: float, dy: torch.Tensor) -> torch.Tensor:
    y, dy = native.readable(y), native.readable(dy)
    dx = rows.like(y)
    count, columns = rows.sizes(y)
    where = (count, y.shape[2], columns, dy, dx, threads())
    _library().softmax_backward(y, native.DTYPES[y.dtype], causal, scale, *where)
    return dx


def _library() -> Any:
    return native.cpp_functions("softmax", _SIGNATURES)
