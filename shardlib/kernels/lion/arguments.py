"""What the implementations of Lion are given: tensors, and what one step multiplies every element by."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class Factors(NamedTuple):
    """Numbers of one Lion step, in float64; see `shardlib.kernels.lion.op` for what they are."""

    b1: float
    rest1: float
    b2: float
    rest2: float
    decay: float
    size: float


class Step(NamedTuple):
    """One Lion step on flat tensors of one shape."""

    param: torch.Tensor
    grad: torch.Tensor
    mu: torch.Tensor
    copy: torch.Tensor | None
    factors: Factors
    scale: torch.Tensor | None


def factors_at(lr: Any, b1: float, b2: float, weight_decay: float) -> Factors:
    """A step at rate ``lr``: a number, or a 0-d float64 tensor that derivatives pass through."""
    return Factors(b1, 1 - b1, b2, 1 - b2, 1 - lr * weight_decay, lr)
