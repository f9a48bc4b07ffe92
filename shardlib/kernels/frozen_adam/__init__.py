"""Steps of Adam whose variance v is frozen, on flat tensors (arXiv 2102.02888, 2104.06069, 2202.06009).

m̄ is m where v > 0, and 0 where v = 0 (an element that no gradient has reached would be divided by ε alone). The steps:

- `local_momentum_`, what a rank sends, from its gradient g times ``scale``:  g ← β1·m + (1−β1)·g.
- `frozen_step_` of 1-bit Adam, from the momentum m that all ranks share:  m ← m̄;  p ← p − η·(m̄/(√v + ε) + λ·p).
- `local_step_` of 0/1 Adam between exchanges, with u the rank's movement since the last exchange:
  m ← β1·m + (1−β1)·g;  m ← m̄;  u ← u − η·m̄/(√v + ε).
- `fresh_step_` of 1-bit LAMB, from a received momentum m that was multiplied by a factor s, the last step's momentum b, and
  f, the variance as it would have become:  m ← m/s;  m ← m̄;  f ← β2·f + (1−β2)·((m̄ − β1·b)/(1−β1))²;  b ← m̄/(√v + ε).

Arithmetic is in fp32 and every product is rounded before it is added, so that all implementations give the same bits, except
that the compiled kernel on the CPU reads and writes denormals as zero. Plain torch computes other dtypes and strided tensors.

Bytes moved per element: 12, 20 (and 2 for a copy of p in 16 bits), 24 and 28; plain torch moves several times that. 4 to 14
operations, among them a root and a division in each step but the first, and two more in the last.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from shardlib.kernels.common.dispatch import Plain
from shardlib.kernels.common.flat import CompiledSteps, run

__all__ = ["fresh_step_", "frozen_move", "frozen_step_", "local_momentum_", "local_step_"]

IMPLEMENTATIONS: dict[str, tuple[str, ...]] = {"cpu": ("cpu",), "cuda": ("cuda", "triton")}


class LocalMomentum(NamedTuple):
    grad: torch.Tensor
    mu: torch.Tensor
    b1: float
    rest1: float
    scale: torch.Tensor | None


class FrozenStep(NamedTuple):
    param: torch.Tensor
    mu: torch.Tensor
    nu: torch.Tensor
    copy: torch.Tensor | None
    size: float
    eps: float
    weight_decay: float


class LocalStep(NamedTuple):
    grad: torch.Tensor
    mu: torch.Tensor
    nu: torch.Tensor
    moved: torch.Tensor
    size: float
    b1: float
    rest1: float
    eps: float
    scale: torch.Tensor | None


class FreshStep(NamedTuple):
    mu: torch.Tensor
    before: torch.Tensor
    nu: torch.Tensor
    fresh: torch.Tensor
    b1: float
    rest1: float
    b2: float
    rest2: float
    eps: float
    scale: torch.Tensor


def local_momentum_(
    grad: torch.Tensor, mu: torch.Tensor, *, b1: float, scale: torch.Tensor | None = None, using: str | None = None
) -> None:
    """Writes this rank's new momentum over ``grad``; tensors of one shape and dtype.

    Args:
        scale: multiplies the gradient first, a 0-d float64 tensor on its device.
        using: as for `shardlib.kernels.adamw.adamw_`.
    """
    run("local_momentum_", LocalMomentum(grad, mu, b1, 1 - b1, scale), using)


def frozen_step_(
    param: torch.Tensor,
    mu: torch.Tensor,
    nu: torch.Tensor,
    *,
    lr: torch.Tensor,
    eps: float,
    weight_decay: float,
    copy: torch.Tensor | None = None,
    using: str | None = None,
) -> None:
    """1-bit Adam's step in place on tensors of one shape and dtype.

    Args:
        lr: 0-d float tensor.
        copy: is filled with the new parameter, bf16 or fp16.
        using: see `local_momentum_`.
    """
    run("frozen_step_", FrozenStep(param, mu, nu, copy, -float(lr), eps, weight_decay), using)


def frozen_move(
    param: torch.Tensor, mu: torch.Tensor, nu: torch.Tensor, *, lr: torch.Tensor, eps: float, weight_decay: float
) -> torch.Tensor:
    """The exact amount that `frozen_step_` adds to the parameter, as a new tensor; masks ``mu`` in place as the step does."""
    return _move(FrozenStep(param, mu, nu, None, -float(lr), eps, weight_decay))


def local_step_(
    grad: torch.Tensor,
    mu: torch.Tensor,
    nu: torch.Tensor,
    moved: torch.Tensor,
    *,
    lr: torch.Tensor,
    b1: float,
    eps: float,
    scale: torch.Tensor | None = None,
    using: str | None = None,
) -> None:
    """0/1 Adam's step on one rank: updates ``mu`` and ``moved`` in place; tensors of one shape and dtype.

    Args:
        lr: 0-d float tensor.
        scale: multiplies the gradient first, a 0-d float64 tensor on its device.
        using: see `local_momentum_`.
    """
    run("local_step_", LocalStep(grad, mu, nu, moved, -float(lr), b1, 1 - b1, eps, scale), using)


def fresh_step_(
    mu: torch.Tensor,
    before: torch.Tensor,
    nu: torch.Tensor,
    fresh: torch.Tensor,
    *,
    spread: torch.Tensor,
    b1: float,
    b2: float,
    eps: float,
    using: str | None = None,
) -> None:
    """1-bit LAMB's step after an exchange of momentum: updates all but ``nu`` in place; tensors of one shape and dtype.

    Args:
        mu: the received momentum, times ``spread``.
        before: the last step's momentum; receives the direction.
        fresh: the variance as it would have become.
        spread: the factor by which momentum was multiplied when sent, a 0-d float64 tensor on its device.
        using: see `local_momentum_`.
    """
    run("fresh_step_", FreshStep(mu, before, nu, fresh, b1, 1 - b1, b2, 1 - b2, eps, spread), using)


class reference(Plain):
    """In plain torch: the oracle of the kernels, and the fallback."""

    @staticmethod
    def local_momentum_(step: LocalMomentum) -> None:
        grad, mu, b1, rest1, scale = step
        if scale is not None:
            grad.mul_(scale)
        grad.mul_(rest1).add_(mu * b1)

    @staticmethod
    def frozen_step_(step: FrozenStep) -> None:
        step.param.add_(_move(step))
        if step.copy is not None:
            step.copy.copy_(step.param)

    @staticmethod
    def local_step_(step: LocalStep) -> None:
        grad, mu, nu, moved, size, b1, rest1, eps, scale = step
        g = grad if scale is None else grad * scale
        mu.mul_(b1).add_(g * rest1)
        moved.add_(_direction(mu, nu, eps) * size)

    @staticmethod
    def fresh_step_(step: FreshStep) -> None:
        mu, before, nu, fresh, b1, rest1, b2, rest2, eps, spread = step
        mu.div_(spread)
        u = _direction(mu, nu, eps)
        g = (mu - before * b1) / torch.full_like(mu, rest1)  # CUDA would multiply by a Python number's reciprocal
        fresh.mul_(b2).add_(g * g * rest2)
        before.copy_(u)


def _move(step: FrozenStep) -> torch.Tensor:
    # Each product is rounded before it is added, which torch.add(..., alpha=) does not do.
    return (_direction(step.mu, step.nu, step.eps) + step.param * step.weight_decay) * step.size


def _direction(mu: torch.Tensor, nu: torch.Tensor, eps: float) -> torch.Tensor:
    """m̄/(√v + ε); writes m̄ to ``mu``."""
    mu.copy_(torch.where(nu == 0, mu - mu, mu))  # NaN if mu is not finite
    root = nu.to(torch.float64).sqrt().to(nu.dtype)  # torch's fp32 root is not always correctly rounded
    return mu / (root + eps)


class cpu(
    CompiledSteps,
    local_momentum_=LocalMomentum,
    frozen_step_=FrozenStep,
    local_step_=LocalStep,
    fresh_step_=FreshStep,
):
    """By frozen_adam.cpp."""


class cuda(cpu):
    """By frozen_adam.cu."""
