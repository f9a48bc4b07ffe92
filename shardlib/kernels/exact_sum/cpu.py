"""The digits of Σ x² on the CPU, by exact_sum.cpp."""

from __future__ import annotations

from typing import Any

import torch

from shardlib.common.thresholds import threads
from shardlib.kernels.common import native
from shardlib.kernels.exact_sum import digits

_SPAN = 1 << 18  # as in exact_sum.cpp
_SIGNATURES = {"digits_of_squares": "pilppi"}


def load(device: torch.device) -> str:
    return native.description("exact_sum")


def digits_of_squares(x: torch.Tensor) -> torch.Tensor:
    spans = -(-x.numel() // _SPAN)
    integers = torch.zeros((spans, digits.PLACES), dtype=torch.int64)
    strange = torch.zeros(spans, dtype=torch.float64)
    _library().digits_of_squares(x, native.DTYPES[x.dtype], x.numel(), integers, strange, threads())
    return digits.of_integers(integers.sum(dim=0), strange.sum())


def _library() -> Any:
    return native.cpp_functions("exact_sum", _SIGNATURES)
