"""Lion on flat tensors (arXiv 2302.06675, algorithm 2), in one pass over mixed dtypes.

With g the gradient times ``scale``, sgn(0) = 0 and sgn(NaN) = NaN:

    p ← p·(1 − η·λ) − η·sgn(β1·m + (1−β1)·g);  m ← β2·m + (1−β2)·g

and, if asked for, a copy of p in 16 bits. p and m have one dtype, fp32 under mixed precision; the gradient may have another
of fp32, bf16 and fp16. Arithmetic is in fp32 and every product is rounded before it is added, so that all implementations
give the same bits, except that the compiled kernel on the CPU reads and writes denormals as zero. Plain torch computes
float64 and strided tensors.

Bytes moved per element: with an fp32 state 16 for p and m in and out, 4 or 2 for the gradient, 2 for the copy. 11 operations.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from shardlib.kernels.common.dispatch import Plain
from shardlib.kernels.common.flat import CompiledSteps, run

__all__ = ["LionOld", "changes", "factors_at", "lion_"]

IMPLEMENTATIONS: dict[str, tuple[str, ...]] = {"cpu": ("cpu",), "cuda": ("cuda", "triton")}


class LionFactors(NamedTuple):
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


class LionStep(NamedTuple):
    """One Lion step on flat tensors of one shape."""

    param: torch.Tensor
    grad: torch.Tensor
    mu: torch.Tensor
    copy: torch.Tensor | None
    factors: LionFactors
    scale: torch.Tensor | None


class LionOld(NamedTuple):
    """The values before a step that writes its tensors elsewhere."""

    param: torch.Tensor
    mu: torch.Tensor


def factors_at(lr: Any, b1: float, b2: float, weight_decay: float) -> LionFactors:
    """The factors of a step at rate ``lr``, a number or a differentiable 0-d float64 tensor."""
    return LionFactors(b1, 1 - b1, b2, 1 - b2, 1 - lr * weight_decay, lr)


def lion_(
    param: torch.Tensor,
    grad: torch.Tensor,
    mu: torch.Tensor,
    factors: LionFactors,
    *,
    scale: torch.Tensor | None = None,
    copy: torch.Tensor | None = None,
    old: LionOld | None = None,
    using: str | None = None,
) -> None:
    """One Lion step in place on tensors of one shape.

    Args:
        factors: of the step, by `factors_at` of numbers.
        scale, copy, old, using: as for `shardlib.kernels.adamw.adamw_`, which raises the same errors.
    """
    run("lion_", LionStep(param, grad, mu, copy, factors, scale), using, mixed=True, old=old)


class reference(Plain):
    """In plain torch, one operation at a time: the oracle of the kernels, and the fallback."""

    @staticmethod
    def lion_(step: LionStep) -> None:
        param, grad, mu, copy, factors, scale = step
        m, moved = changes(grad, mu, factors, scale)
        p = param.to(m.dtype) * factors.decay - moved
        mu.copy_(m)
        param.copy_(p)
        if copy is not None:
            copy.copy_(p)


def changes(
    grad: torch.Tensor, mu: torch.Tensor, factors: LionFactors, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The momentum after a step, and what the step subtracts from the decayed parameter; new tensors, fp32 at least."""
    wide = torch.promote_types(mu.dtype, torch.float32)
    g = grad.to(wide) if scale is None else grad.to(wide) * scale
    m = mu.to(wide)
    # Each product is rounded before it is added, which torch.add(..., alpha=) does not do.
    moved = _sign(m * factors.b1 + g * factors.rest1) * factors.size
    return m * factors.b2 + g * factors.rest2, moved


def _sign(x: torch.Tensor) -> torch.Tensor:
    """The sign: −1, 0 or 1, and NaN of NaN, for which torch's is 0."""
    return torch.where(x == x, x.sign(), x)


class cpu(CompiledSteps, mixed=("lion_",), lion_=LionStep):
    """By lion.cpp."""


class cuda(cpu):
    """By lion.cu."""
