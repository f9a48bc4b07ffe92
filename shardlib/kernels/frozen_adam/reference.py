"""Adam's steps with a frozen variance in plain torch: the oracle of the kernels, and the fallback. Serves every dtype.

See `shardlib.kernels.frozen_adam.op` for what the functions do; ``size`` is −η.
"""

from __future__ import annotations

import torch


def load(device: torch.device) -> str:
    return "reference"


def own_momentum_(grad: torch.Tensor, mu: torch.Tensor, b1: float, rest1: float, scale: torch.Tensor | None) -> None:
    if scale is not None:
        grad.mul_(scale)
    grad.mul_(rest1).add_(mu * b1)


def frozen_step_(
    param: torch.Tensor,
    mu: torch.Tensor,
    nu: torch.Tensor,
    copy: torch.Tensor | None,
    size: float,
    eps: float,
    weight_decay: float,
) -> None:
    param.add_(frozen_move(param, mu, nu, size, eps, weight_decay))
    if copy is not None:
        copy.copy_(param)


def frozen_move(
    param: torch.Tensor, mu: torch.Tensor, nu: torch.Tensor, size: float, eps: float, weight_decay: float
) -> torch.Tensor:
    # Each product is rounded before it is added: torch's own sums with a factor are not.
    return (_direction(mu, nu, eps) + param * weight_decay) * size


def local_step_(
    grad: torch.Tensor,
    mu: torch.Tensor,
    nu: torch.Tensor,
    moved: torch.Tensor,
    size: float,
    b1: float,
    rest1: float,
    eps: float,
    scale: torch.Tensor | None,
) -> None:
    g = grad if scale is None else grad * scale
    mu.mul_(b1).add_(g * rest1)
    moved.add_(_direction(mu, nu, eps) * size)


def fresh_step_(
    mu: torch.Tensor,
    before: torch.Tensor,
    nu: torch.Tensor,
    fresh: torch.Tensor,
    spread: torch.Tensor,
    b1: float,
    rest1: float,
    b2: float,
    rest2: float,
    eps: float,
) -> None:
    mu.div_(spread)
    u = _direction(mu, nu, eps)
    g = (mu - before * b1) / torch.full_like(mu, rest1)  # a Python number would be inverted first on CUDA
    fresh.mul_(b2).add_(g * g * rest2)
    before.copy_(u)


def _direction(mu: torch.Tensor, nu: torch.Tensor, eps: float) -> torch.Tensor:
    """m̄/(√v + ε); leaves m̄ in ``mu``."""
    mu.copy_(torch.where(nu == 0, mu - mu, mu))  # what is not finite becomes NaN
    root = nu.to(torch.float64).sqrt().to(nu.dtype)  # torch's own fp32 root is not always the nearest
    return mu / (root + eps)
