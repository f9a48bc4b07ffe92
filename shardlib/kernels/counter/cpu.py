"""Random bits from a counter on the CPU, by counter.cpp."""

from __future__ import annotations

import torch

from shardlib.common.thresholds import threads
from shardlib.kernels.common import native

_SIGNATURES = {"random_bits": "lplpi"}


def load(device: torch.device) -> str:
    return native.description("counter")


def random_bits(seed: int, index: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(index)
    functions = native.cpp_functions("counter", _SIGNATURES)
    functions.random_bits(seed, index, index.numel(), out, threads())
    return out
