"""Random bits from a counter in plain torch."""

from __future__ import annotations

import torch

_MASK = 0xFFFFFFFF


def load(device: torch.device) -> str:
    return "reference"


def random_bits(seed: int, index: torch.Tensor) -> torch.Tensor:
    x = _mix((index & _MASK) ^ (seed & _MASK)) ^ _mix((index >> 32 & _MASK) ^ (seed >> 32 & _MASK))
    return _mix(x) >> 8


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _MASK
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _MASK
    return x ^ (x >> 16)
