"""Σ x² on the CPU, by global_norm.cpp."""

from __future__ import annotations

from typing import Any

import torch

from shardlib.common.thresholds import threads
from shardlib.kernels.common import native

_SPAN = 1 << 16  # as in global_norm.cpp

_SIGNATURES = {"sum_of_squares": "pilppi"}


def load(device: torch.device) -> str:
    return native.description("global_norm")


def sum_of_squares(x: torch.Tensor) -> torch.Tensor:
    out, partial = torch.empty((), dtype=torch.float64), torch.empty(-(-x.numel() // _SPAN), dtype=torch.float64)
    _library().sum_of_squares(x, native.DTYPES[x.dtype], x.numel(), partial, out, threads())
    return out


def _library() -> Any:
    return native.cpp_functions("global_norm", _SIGNATURES)
