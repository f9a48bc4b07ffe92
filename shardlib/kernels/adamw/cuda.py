"""AdamW on NVIDIA GPUs, by adamw.cu."""

from __future__ import annotations

from typing import Any

import torch

from shardlib.kernels.adamw.arguments import Direction, Step
from shardlib.kernels.common import native

_SIGNATURES = {"adamw_step": "pipipppil" + "f" * 8 + "pp", "adam_direction": "ppppl" + "f" * 8 + "pp"}


def load(device: torch.device) -> str:
    _library()
    return "CUDA C++"


def adamw_(step: Step) -> None:
    param, grad, mu, nu, copy, factors, scale = step
    buffers = (*native.typed(param, grad), mu, nu, *native.copied(copy))
    _library().adamw_step(*buffers, param.numel(), *factors, scale, native.stream(param.device))


def adam_direction_(direction: Direction) -> None:
    param, grad, mu, nu, factors, scale = direction
    _library().adam_direction(param, grad, mu, nu, param.numel(), *factors, scale, native.stream(param.device))


def _library() -> Any:
    return native.cuda_functions("adamw", _SIGNATURES)
