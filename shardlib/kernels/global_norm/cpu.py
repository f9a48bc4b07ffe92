"""Σ x² on the CPU, by global_norm.cpp."""

from __future__ import annotations

import functools
from typing import Any

import torch

from shardlib.kernels import native

_SPAN = 1 << 16  # as in global_norm.cpp


def load(device: torch.device) -> str:
    return native.description("global_norm")


def sum_of_squares(x: torch.Tensor) -> torch.Tensor:
    out, partial = torch.empty((), dtype=torch.float64), torch.empty(-(-x.numel() // _SPAN), dtype=torch.float64)
    _library().sum_of_squares(x, native.DTYPES[x.dtype], x.numel(), partial, out, torch.get_num_threads())
    return out


def _library() -> Any:
    return _functions(native.instruction_set("global_norm"))


@functools.cache
def _functions(instruction_set: str) -> Any:
    return native.functions(native.cpp_path("global_norm"), {"sum_of_squares": "pilppi"}, "_" + instruction_set)
