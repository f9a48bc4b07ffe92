"""What one step of AdamW multiplies by: the same numbers for every element and every implementation."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch


class Step(NamedTuple):
    """Computed in float64; see `shardlib.kernels.adamw.op` for what they are."""

    b1: float
    rest1: float
    b2: float
    rest2: float
    decay: float
    size: float
    root: float
    eps: float


def step_at(count: torch.Tensor, lr: torch.Tensor, b1: float, b2: float, eps: float, weight_decay: float) -> Step:
    """The numbers of step ``count`` (from 1) at rate ``lr``, both 0-d."""
    number, rate = float(count), float(lr)
    return Step(
        b1=b1,
        rest1=1 - b1,
        b2=b2,
        rest2=1 - b2,
        decay=1 - rate * weight_decay,
        size=rate / (1 - b1**number),
        root=1 / math.sqrt(1 - b2**number),
        eps=eps,
    )
