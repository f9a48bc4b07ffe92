"""Arguments of the implementations of Adam's steps with a frozen variance: flat tensors of one shape, and numbers.

See `shardlib.kernels.frozen_adam.op` for the mathematics; ``size`` is −η, ``rest1`` is 1 − β1, ``rest2`` is 1 − β2.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


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
    spread: torch.Tensor
    b1: float
    rest1: float
    b2: float
    rest2: float
    eps: float
