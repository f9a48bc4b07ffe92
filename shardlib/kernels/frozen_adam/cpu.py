"""Adam's steps with a frozen variance on the CPU, by frozen_adam.cpp."""

from __future__ import annotations

from typing import Any

import torch

from shardlib.common.thresholds import threads
from shardlib.kernels.common import native
from shardlib.kernels.frozen_adam.arguments import FreshStep, FrozenStep, LocalMomentum, LocalStep

_SIGNATURES = {
    "local_momentum": "pplfffi",
    "frozen_step": "ppppilfffi",
    "local_step": "pppplfffffi",
    "fresh_step": "pppplffffffi",
}


def load(device: torch.device) -> str:
    return native.description("frozen_adam")


def local_momentum_(step: LocalMomentum) -> None:
    grad, mu, *factors, scale = step
    _library().local_momentum(grad, mu, mu.numel(), *factors, native.factor(scale), threads())


def frozen_step_(step: FrozenStep) -> None:
    param, mu, nu, copy, *factors = step
    _library().frozen_step(param, mu, nu, *native.copied(copy), nu.numel(), *factors, threads())


def local_step_(step: LocalStep) -> None:
    grad, mu, nu, moved, *factors, scale = step
    _library().local_step(grad, mu, nu, moved, nu.numel(), *factors, native.factor(scale), threads())


def fresh_step_(step: FreshStep) -> None:
    mu, before, nu, fresh, spread, *factors = step
    _library().fresh_step(mu, before, nu, fresh, mu.numel(), float(spread), *factors, threads())


def _library() -> Any:
    return native.cpp_functions("frozen_adam", _SIGNATURES)
