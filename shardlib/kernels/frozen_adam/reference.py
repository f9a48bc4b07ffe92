"""Adam's steps with a frozen variance in plain torch: the oracle of the kernels, and the fallback. Supports every dtype.

See `shardlib.kernels.frozen_adam.op` for the mathematics.
"""

from __future__ import annotations

import torch

from shardlib.kernels.frozen_adam.arguments import FreshStep, FrozenStep, LocalMomentum, LocalStep


def load(device: torch.device) -> str:
    return "reference"


def local_momentum_(step: LocalMomentum) -> None:
    grad, mu, b1, rest1, scale = step
    if scale is not None:
        grad.mul_(scale)
    grad.mul_(rest1).add_(mu * b1)


def frozen_step_(step: FrozenStep) -> None:
    step.param.add_(frozen_move(step))
    if step.copy is not None:
        step.copy.copy_(step.param)


def frozen_move(step: FrozenStep) -> torch.Tensor:
    # Each product is rounded before it is added, which torch.add(..., alpha=) does not do.
    return (_direction(step.mu, step.nu, step.eps) + step.param * step.weight_decay) * step.size


def local_step_(step: LocalStep) -> None:
    grad, mu, nu, moved, size, b1, rest1, eps, scale = step
    g = grad if scale is None else grad * scale
    mu.mul_(b1).add_(g * rest1)
    moved.add_(_direction(mu, nu, eps) * size)


def fresh_step_(step: FreshStep) -> None:
    mu, before, nu, fresh, spread, b1, rest1, b2, rest2, eps = step
    mu.div_(spread)
    u = _direction(mu, nu, eps)
    g = (mu - before * b1) / torch.full_like(mu, rest1)  # CUDA would multiply by a Python number's reciprocal
    fresh.mul_(b2).add_(g * g * rest2)
    before.copy_(u)


def _direction(mu: torch.Tensor, nu: torch.Tensor, eps: float) -> torch.Tensor:
    """m̄/(√v + ε); writes m̄ to ``mu``."""
    mu.copy_(torch.where(nu == 0, mu - mu, mu))  # NaN if mu is not finite
    root = nu.to(torch.float64).sqrt().to(nu.dtype)  # torch's fp32 root is not always correctly rounded
    return mu / (root + eps)
