"""Rotary position embedding on the CPU, by rotary.cpp."""

from __future__ import annotations

from typing import Any

import torch

from shardlib.common.thresholds import threads
from shardlib.kernels.common import native, rows

_SIGNATURES = {"rotary": "pippiillllpi"}


def load(device: torch.device) -> str:
    return native.description("rotary")


def turn(x: torch.Tensor, both: torch.Tensor, interleaved: bool, back: bool) -> torch.Tensor:
    x = native.readable(x)
    y = rows.like(x)
    cos, sin = (both.repeat_interleave(2, -1) if interleaved else both.contiguous()).unbind()
    where = (*rows.sizes(x), *both.shape[1:], y, threads())
    _library().rotary(x, native.DTYPES[x.dtype], cos, sin, interleaved, back, *where)
    return y


def _library() -> Any:
    return native.cpp_functions("rotary", _SIGNATURES)
