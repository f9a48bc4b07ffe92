"""Steps of the 1-bit optimizers with Adam's moments, without bias correction (arXiv 2102.02888, 2104.06069, 2202.06009)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from shardlib.kernels.adamw import adam_direction_, direction_at
from shardlib.kernels.frozen_adam import frozen_move, frozen_step_
from shardlib.optim.stepping import ParameterChange, each_tensor
from shardlib.tree import Tree


def adam_step(
    params: Tree,
    grads: Tree,
    mu: Tree,
    nu: Tree,
    *,
    lr: torch.Tensor,
    b1: float,
    b2: float,
    eps: float,
    weight_decay: float,
    scale: torch.Tensor | None,
) -> ParameterChange:
    """Adam's step from gradients averaged in full precision. Updates both moments in place, and uses up ``grads``."""
    direct = partial(adam_direction_, factors=direction_at(None, b1, b2, eps, weight_decay), scale=scale)
    each_tensor(direct, params, grads, mu, nu)
    return ParameterChange(lambda p, u: u.mul_(-lr), (grads,))


def frozen_step(mu: Tree, nu: Tree, *, lr: torch.Tensor, eps: float, weight_decay: float) -> ParameterChange:
    """The step from compressed momentum with a frozen variance. Applies `mask` to ``mu`` in the same pass."""
    options: dict[str, Any] = {"lr": lr, "eps": eps, "weight_decay": weight_decay}
    return ParameterChange(partial(frozen_move, **options), (mu, nu), in_place=partial(frozen_step_, **options))


def mask(m: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Zero m in place where v is zero.

    Signs are sent even for elements that no gradient ever reached, whose steps would be divided by eps alone. By a product,
    since torch's masked operations take several times as long.
    """
    return m.mul_(v.sign())


def root(v: torch.Tensor, eps: float) -> torch.Tensor:
    """``√v + eps``."""
    return v.sqrt().add_(eps)
