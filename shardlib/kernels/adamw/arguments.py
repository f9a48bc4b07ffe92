"""Arguments of the implementations of AdamW: tensors, and the factors of a step."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch


class Factors(NamedTuple):
    """Factors of one AdamW step, in float64.

    Attributes:
        b1, b2: β1 and β2; ``rest1`` and ``rest2`` are 1 − β1 and 1 − β2.
        decay: 1 − η·λ.
        size: η/(1 − β1ᵗ).
        root: 1/√(1 − β2ᵗ).
        eps: ε.
    """

    b1: float
    rest1: float
    b2: float
    rest2: float
    decay: float
    size: float
    root: float
    eps: float


class DirectionFactors(NamedTuple):
    """Factors of Adam's direction: those of a step with η = 1, and λ as ``weight_decay``."""

    b1: float
    rest1: float
    b2: float
    rest2: float
    size: float
    root: float
    eps: float
    weight_decay: float


class Step(NamedTuple):
    """One AdamW step on flat tensors of one shape."""

    param: torch.Tensor
    grad: torch.Tensor
    mu: torch.Tensor
    nu: torch.Tensor
    copy: torch.Tensor | None
    factors: Factors
    scale: torch.Tensor | None


class Old(NamedTuple):
    """The values before a step that writes its tensors elsewhere."""

    param: torch.Tensor
    mu: torch.Tensor
    nu: torch.Tensor


class Direction(NamedTuple):
    """Adam's direction on flat tensors of one shape and dtype."""

    param: torch.Tensor
    grad: torch.Tensor
    mu: torch.Tensor
    nu: torch.Tensor
    factors: DirectionFactors
    scale: torch.Tensor | None


def factors_at(count: Any, lr: Any, b1: float, b2: float, eps: float, weight_decay: float) -> Factors:
    """The factors of step ``count`` (from 1) at rate ``lr``: numbers, or differentiable 0-d float64 tensors."""
    correction = 1 - b2**count
    root: Any = correction.sqrt() if isinstance(correction, torch.Tensor) else math.sqrt(correction)
    return Factors(
        b1=b1,
        rest1=1 - b1,
        b2=b2,
        rest2=1 - b2,
        decay=1 - lr * weight_decay,
        size=lr / (1 - b1**count),
        root=1 / root,
        eps=eps,
    )


def direction_at(count: float | None, b1: float, b2: float, eps: float, weight_decay: float) -> DirectionFactors:
    """The factors of Adam's direction at step ``count`` (from 1); without bias correction if ``count`` is None."""
    size, root = (1.0, 1.0) if count is None else factors_at(count, 1.0, b1, b2, eps, 0.0)[5:7]
    return DirectionFactors(b1, 1 - b1, b2, 1 - b2, size, root, eps, weight_decay)
