"""Bias + GeLU on the CPU, by gelu.cpp."""

from __future__ import annotations

from typing import Any

import torch

from shardlib.common.thresholds import threads
from shardlib.kernels.common import native, results, rows

_SIGNATURES = {"gelu": "pipillpi", "gelu_backward": "pipipllpppi"}


def load(device: torch.device) -> str:
    return native.description("gelu")


def forward(x: torch.Tensor, bias: torch.Tensor | None, tanh: bool) -> torch.Tensor:
    x = native.readable(x)
    y = results.like(x)
    where = (*rows.sizes(x), y, threads())
    _library().gelu(x, native.DTYPES[x.dtype], native.floats(bias), tanh, *where)
    return y


def backward(x: torch.Tensor, bias: torch.Tensor | None, tanh: bool, dy: torch.Tensor) -> list[torch.Tensor]:
    x, dy = native.readable(x), native.readable(dy)
    dx = results.like(x)
    dbias, partial = (None, None) if bias is None else (torch.empty(bias.shape), rows.partial_sums(len(bias)))
    where = (*rows.sizes(x), dx, partial, dbias, threads())
    _library().gelu_backward(x, native.DTYPES[x.dtype], native.floats(bias), tanh, dy, *where)
    return [dx] if dbias is None else [dx, dbias]


def _library() -> Any:
    return native.cpp_functions("gelu", _SIGNATURES)
