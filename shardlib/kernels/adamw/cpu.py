"""AdamW on the CPU, by adamw.cpp."""

from __future__ import annotations

from typing import Any

import torch

from shardlib.common.thresholds import threads
from shardlib.kernels.adamw.arguments import Direction, Old, Step
from shardlib.kernels.common import native

READS_OLD = True  # states may be read elsewhere than they are written

_SIGNATURES = {"adamw_step": "ppppipipppil" + "f" * 9 + "i", "adam_direction": "ppppl" + "f" * 9 + "i"}


def load(device: torch.device) -> str:
    return native.description("adamw")


def adamw_(step: Step, old: Old | None = None) -> None:
    param, grad, mu, nu, copy, factors, scale = step
    buffers = (*(old or (param, mu, nu)), *native.typed(param, grad), mu, nu, *native.copied(copy))
    _library().adamw_step(*buffers, param.numel(), *factors, native.factor(scale), threads())


def adam_direction_(direction: Direction) -> None:
    param, grad, mu, nu, factors, scale = direction
    _library().adam_direction(param, grad, mu, nu, param.numel(), *factors, native.factor(scale), threads())


def _library() -> Any:
    return native.cpp_functions("adamw", _SIGNATURES)
