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


class Direction(NamedTuple):
    """The same without a length."""

    b1: float
    rest1: float
    b2: float
    rest2: float
    size: float
    root: float
    eps: float
    weight_decay: float


def direction_at(count: torch.Tensor | None, b1: float, b2: float, eps: float, weight_decay: float) -> Direction:
    """The numbers of step ``count`` (from 1, 0-d), or None for no bias correction."""
    if count is None:
        return Direction(b1, 1 - b1, b2, 1 - b2, 1.0, 1.0, eps, weight_decay)
    step = step_at(count, torch.ones(()), b1, b2, eps, 0.0)
    return Direction(b1, 1 - b1, b2, 1 - b2, step.size, step.root, eps, weight_decay)


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
