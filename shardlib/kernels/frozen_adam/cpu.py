"""Adam's steps with a frozen variance on the CPU, by frozen_adam.cpp."""

from __future__ import annotations

from typing import Any

import torch

from shardlib.kernels.common import native
from shardlib.kernels.common.thresholds import threads

_SIGNATURES = {
    "own_momentum": "pplfffi",
    "frozen_step": "ppppilfffi",
    "local_step": "pppplfffffi",
    "fresh_step": "pppplffffffi",
}


def load(device: torch.device) -> str:
    return native.description("frozen_adam")


def own_momentum_(grad: torch.Tensor, mu: torch.Tensor, b1: float, rest1: float, scale: torch.Tensor | None) -> None:
    factor = 1.0 if scale is None else float(scale)
    _library().own_momentum(grad, mu, mu.numel(), b1, rest1, factor, threads())


def frozen_step_(
    param: torch.Tensor,
    mu: torch.Tensor,
    nu: torch.Tensor,
    copy: torch.Tensor | None,
    size: float,
    eps: float,
    weight_decay: float,
) -> None:
    narrow = -1 if copy is None else native.DTYPES[copy.dtype]
    _library().frozen_step(param, mu, nu, copy, narrow, nu.numel(), size, eps, weight_decay, threads())


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
    factors = (size, b1, rest1, eps, 1.0 if scale is None else float(scale))
    _library().local_step(grad, mu, nu, moved, nu.numel(), *factors, threads())


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
    factors = (float(spread), b1, rest1, b2, rest2, eps)
    _library().fresh_step(mu, before, nu, fresh, mu.numel(), *factors, threads())


def _library() -> Any:
    return native.cpp_functions("frozen_adam", _SIGNATURES)
