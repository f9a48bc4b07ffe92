"""AdamW on flat tensors (arXiv 1711.05101, algorithm 2), in one pass over mixed dtypes.

With g the gradient times ``scale``, at step t and rate η:

    m ← β1·m + (1−β1)·g;  v ← β2·v + (1−β2)·g²;  p ← p·(1 − η·λ) − (m·η/(1−β1ᵗ)) / (√v·1/√(1−β2ᵗ) + ε)

and, if asked for, a copy of p in 16 bits. p, m and v have one dtype, fp32 under mixed precision; the gradient may have
another of fp32, bf16 and fp16. Arithmetic is in fp32 and every product is rounded before it is added, so that all
implementations give the same bits, except that compiled kernels read and write denormals as zero and plain torch keeps them.
Plain torch computes float64 and strided tensors.

`adam_direction_` updates m and v in the same way and writes  (m/(1−β1ᵗ)) / (√v·1/√(1−β2ᵗ) + ε) + λ·p  over the gradient,
for optimizers that compute the length of their steps from it (LAMB); all tensors have one dtype.

Bytes moved per element: with fp32 states 24 for p, m and v in and out, 4 or 2 for the gradient, 2 for the copy; so 28 for a
bf16 gradient in and a bf16 parameter out, against 40 by torch's cast, fused step and cast. 15 operations, among them a
division and a root. The direction: 28 bytes, 13 operations.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from shardlib.common.thresholds import chunks
from shardlib.kernels.common.dispatch import Plain
from shardlib.kernels.common.flat import CompiledSteps, run

__all__ = ["AdamWOld", "adam_direction_", "adamw_", "changes", "direction_at", "factors_at"]

IMPLEMENTATIONS: dict[str, tuple[str, ...]] = {"cpu": ("cpu",), "cuda": ("cuda", "triton")}


class AdamWFactors(NamedTuple):
    """Factors of one AdamW step, or of Adam's direction, which has η = 1; in float64.

    Attributes:
        b1, b2: β1 and β2; ``rest1`` and ``rest2`` are 1 − β1 and 1 − β2.
        decay: 1 − η·λ; of the direction λ.
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


class AdamWStep(NamedTuple):
    """One AdamW step on flat tensors of one shape."""

    param: torch.Tensor
    grad: torch.Tensor
    mu: torch.Tensor
    nu: torch.Tensor
    copy: torch.Tensor | None
    factors: AdamWFactors
    scale: torch.Tensor | None


class AdamWOld(NamedTuple):
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
    factors: AdamWFactors
    scale: torch.Tensor | None


def factors_at(count: Any, lr: Any, b1: float, b2: float, eps: float, weight_decay: float) -> AdamWFactors:
    """The factors of step ``count`` (from 1) at rate ``lr``: numbers, or differentiable 0-d float64 tensors."""
    correction = 1 - b2**count
    root: Any = correction.sqrt() if isinstance(correction, torch.Tensor) else math.sqrt(correction)
    return AdamWFactors(b1, 1 - b1, b2, 1 - b2, 1 - lr * weight_decay, lr / (1 - b1**count), 1 / root, eps)


def direction_at(count: float | None, b1: float, b2: float, eps: float, weight_decay: float) -> AdamWFactors:
    """The factors of Adam's direction at step ``count`` (from 1); without bias correction if ``count`` is None."""
    if count is None:
        return AdamWFactors(b1, 1 - b1, b2, 1 - b2, weight_decay, 1.0, 1.0, eps)
    return factors_at(count, 1.0, b1, b2, eps, 0.0)._replace(decay=weight_decay)


def adamw_(
    param: torch.Tensor,
    grad: torch.Tensor,
    mu: torch.Tensor,
    nu: torch.Tensor,
    factors: AdamWFactors,
    *,
    scale: torch.Tensor | None = None,
    copy: torch.Tensor | None = None,
    old: AdamWOld | None = None,
    using: str | None = None,
) -> None:
    """One AdamW step in place on tensors of one shape.

    Args:
        factors: of the step, by `factors_at` of numbers.
        scale: multiplies the gradient first, a 0-d float64 tensor: unscaling and clipping take no pass of their own.
        copy: receives the new parameter, bf16 or fp16.
        old: the values before the step, which stay; ``param``, ``mu`` and ``nu`` are then only written.
        using: names one implementation ("cpu", "cuda", "triton", "reference"), for tests.

    Raises:
        ValueError: shapes or devices differ.
        TypeError: a dtype is not supported.
    """
    run("adamw_", AdamWStep(param, grad, mu, nu, copy, factors, scale), using, mixed=True, old=old)


def adam_direction_(
    param: torch.Tensor,
    grad: torch.Tensor,
    mu: torch.Tensor,
    nu: torch.Tensor,
    factors: AdamWFactors,
    *,
    scale: torch.Tensor | None = None,
    using: str | None = None,
) -> None:
    """Writes Adam's direction over ``grad`` and updates both moments in place; tensors of one shape and dtype.

    Args:
        factors: of the step, by `direction_at`.
        scale, using: see `adamw_`.
    """
    run("adam_direction_", Direction(param, grad, mu, nu, factors, scale), using)


class reference(Plain):
    """In plain torch, one operation at a time: the oracle of the kernels, and the fallback."""

    @staticmethod
    def adamw_(step: AdamWStep) -> None:
        param, grad, mu, nu, copy, factors, scale = step
        for p, g, m, v, *narrow in chunks([param, grad, mu, nu] if copy is None else [param, grad, mu, nu, copy]):
            new_m, new_v, moved = changes(g, m, v, factors, scale)
            new_p = p.to(new_m.dtype) * factors.decay - moved
            for target, value in ((m, new_m), (v, new_v), (p, new_p), *((each, new_p) for each in narrow)):
                target.copy_(value)

    @staticmethod
    def adam_direction_(direction: Direction) -> None:
        param, grad, mu, nu, factors, scale = direction
        m, v = _moments(grad if scale is None else grad * scale, mu, nu, factors)
        mu.copy_(m)
        nu.copy_(v)
        grad.copy_(_ratio(m, v, factors) + param * factors.decay)


def changes(
    grad: torch.Tensor, mu: torch.Tensor, nu: torch.Tensor, factors: AdamWFactors, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Both moments after a step, and what the step subtracts from the decayed parameter; new tensors, fp32 at least."""
    wide = torch.promote_types(mu.dtype, torch.float32)
    g = grad.to(wide) if scale is None else grad.to(wide) * scale
    m, v = _moments(g, mu.to(wide), nu.to(wide), factors)
    return m, v, _ratio(m, v, factors)


def _moments(
    g: torch.Tensor, m: torch.Tensor, v: torch.Tensor, factors: AdamWFactors
) -> tuple[torch.Tensor, torch.Tensor]:
    # Each product is rounded before it is added, which torch.add(..., alpha=) does not do.
    return m * factors.b1 + g * factors.rest1, v * factors.b2 + g * g * factors.rest2


def _ratio(m: torch.Tensor, v: torch.Tensor, factors: AdamWFactors) -> torch.Tensor:
    root = v.to(torch.float64).sqrt().to(v.dtype)  # torch's fp32 root is not always correctly rounded
    return m * factors.size / (root * factors.root + factors.eps)


class cpu(CompiledSteps, mixed=("adamw_",), adamw_=AdamWStep, adam_direction_=Direction):
    """By adamw.cpp."""


class cuda(cpu):
    """By adamw.cu."""
