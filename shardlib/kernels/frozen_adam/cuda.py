"""Adam's steps with a frozen variance on NVIDIA GPUs, by frozen_adam.cu."""

from __future__ import annotations

from typing import Any

import torch

from shardlib.kernels.common import native
from shardlib.kernels.frozen_adam.arguments import FreshStep, FrozenStep, LocalMomentum, LocalStep

_SIGNATURES = {
    "local_momentum": "pplffpp",
    "frozen_step": "ppppilfffp",
    "local_step": "pppplffffpp",
    "fresh_step": "pppplpfffffp",
}


def load(device: torch.device) -> str:
    _library()
    return "CUDA C++"


def local_momentum_(step: LocalMomentum) -> None:
    grad, mu, *factors = step
    _library().local_momentum(grad, mu, mu.numel(), *factors, native.stream(mu.device))


def frozen_step_(step: FrozenStep) -> None:
    param, mu, nu, copy, *factors = step
    _library().frozen_step(param, mu, nu, *native.copied(copy), nu.numel(), *factors, native.stream(nu.device))


def local_step_(step: LocalStep) -> None:
    grad, mu, nu, moved, *factors = step
    _library().local_step(grad, mu, nu, moved, nu.numel(), *factors, native.stream(nu.device))


def fresh_step_(step: FreshStep) -> None:
    mu, before, nu, fresh, *factors = step
    _library().fresh_step(mu, before, nu, fresh, mu.numel(), *factors, native.stream(mu.device))


def _library() -> Any:
    return native.cuda_functions("frozen_adam", _SIGNATURES)
