"""What the optimizers of the 1-bit papers do with Adam's moments, without bias correction.

(arXiv 2102.02888, 2104.06069, 2202.06009.)
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from shardlib.kernels.adamw import adam_direction_, direction_at
from shardlib.kernels.frozen_adam import frozen_move, frozen_step_
from shardlib.optim.stepping import Move, each_tensor
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
) -> Move:
    """While gradients are averaged in full precision: take them up into both moments, in place; ``grads`` are used up."""
    direct = partial(adam_direction_, factors=direction_at(None, b1, b2, eps, weight_decay), scale=scale)
    each_tensor(direct, params, grads, mu, nu)
    return Move(lambda p, u: u.mul_(-lr), (grads,))


def frozen_step(mu: Tree, nu: Tree, *, lr: torch.Tensor, eps: float, weight_decay: float) -> Move:
    """From momentum that came in few bits; masks it as well, where it is being read: one pass less."""
    options: dict[str, Any] = {"lr": lr, "eps": eps, "weight_decay": weight_decay}
    return Move(partial(frozen_move, **options), (mu, nu), in_place=partial(frozen_step_, **options))


def mask(m: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Zero m where v is: signs are sent of elements that no gradient ever reached too, and would be divided by eps.

    In place. A product, since torch's masked operations take several times as long.
    """
    return m.mul_(v.sign())


def root(v: torch.Tensor, eps: float) -> torch.Tensor:
    """``√v + eps``."""
    return v.sqrt().add_(eps)
