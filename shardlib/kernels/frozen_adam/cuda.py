"""Adam's steps with a frozen variance on NVIDIA GPUs, by frozen_adam.cu."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch

from shardlib.kernels.common import native

_SIGNATURES = {
    "own_momentum": "pplffpp",
    "frozen_step": "ppppilfffp",
    "local_step": "pppplffffpp",
    "fresh_step": "pppplpfffffp",
}


def load(device: torch.device) -> str:
    _library()
    return "CUDA C++"


def own_momentum_(grad: torch.Tensor, mu: torch.Tensor, b1: float, rest1: float, scale: torch.Tensor | None) -> None:
    _library().own_momentum(grad, mu, mu.numel(), b1, rest1, scale, native.stream(mu.device))


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
    stream = native.stream(nu.device)
    _library().frozen_step(param, mu, nu, copy, narrow, nu.numel(), size, eps, weight_decay, stream)


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
    factors = (size, b1, rest1, eps, scale)
    _library().local_step(grad, mu, nu, moved, nu.numel(), *factors, native.stream(nu.device))


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
    factors = (spread, b1, rest1, b2, rest2, eps)
    _library().fresh_step(mu, before, nu, fresh, mu.numel(), *factors, native.stream(mu.device))


def _library() -> Any:
    return _functions(native.cuda_path("frozen_adam"))


@functools.cache
def _functions(path: Path) -> Any:
    return native.functions(path, _SIGNATURES, checked=True)
