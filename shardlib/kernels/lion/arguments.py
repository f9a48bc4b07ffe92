"""Arguments of the implementations of Lion: tensors, and the factors of a step."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class Factors(NamedTuple):
    """Factors of one Lion step, in float64.

    Attributes:
        b1, b2: β1 and β2; ``rest1`` and ``rest2`` are 1 − β1 and 1 − β2.
        decay: 1 − η·λ.
        size: η.
    """

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


class Old(NamedTuple):
    """The values before a step that writes its tensors elsewhere."""

    param: torch.Tensor
    mu: torch.Tensor


def factors_at(lr: Any, b1: float, b2: float, weight_decay: float) -> Factors:
    """The factors of a step at rate ``lr``, a number or a differentiable 0-d float64 tensor."""
    return Factors(b1, 1 - b1, b2, 1 - b2, 1 - lr * weight_decay, lr)
