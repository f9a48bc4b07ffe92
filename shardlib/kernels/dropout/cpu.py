"""Dropout from a counter on the CPU, by dropout.cpp."""

from __future__ import annotations

from typing import Any

import torch

from shardlib.common.thresholds import threads
from shardlib.kernels.common import native, rows
from shardlib.kernels.dropout.arguments import Draw

_SIGNATURES = {"dropout": "pippfillpllpi", "dropout_backward": "pifillpllpppi"}


def load(device: torch.device) -> str:
    return native.description("dropout")


def forward(x: torch.Tensor, residual: torch.Tensor | None, bias: torch.Tensor | None, draw: Draw) -> torch.Tensor:
    x = native.readable(x)
    residual = None if residual is None else native.readable(residual)
    y = rows.like(x)
    inputs = (x, native.DTYPES[x.dtype], residual, native.floats(bias))
    _library().dropout(*inputs, *_drawn(draw), *rows.sizes(x), y, threads())
    return y


def backward(bias: torch.Tensor | None, draw: Draw, dy: torch.Tensor) -> list[torch.Tensor]:
    dy = native.readable(dy)
    dx = rows.like(dy)
    dbias, partial = (None, None) if bias is None else (torch.empty(bias.shape), rows.partial_sums(len(bias)))
    where = (*_drawn(draw), *rows.sizes(dy), dx, partial, dbias, threads())
    _library().dropout_backward(dy, native.DTYPES[dy.dtype], *where)
    return [dx] if dbias is None else [dx, dbias]


def _drawn(draw: Draw) -> tuple[Any, ...]:
    starts = None if draw.starts is None else draw.starts.contiguous()
    return 1.0 / (1.0 - draw.p), int(draw.p * 2**24), draw.seed, draw.start, starts


def _library() -> Any:
    return native.cpp_functions("dropout", _SIGNATURES)
