"""AdamW on the CPU, by adamw.cpp."""

from __future__ import annotations

from typing import Any

import torch

from shardlib.kernels.adamw.step import Direction, Step
from shardlib.kernels.common import native
from shardlib.kernels.common.thresholds import threads

_SIGNATURES = {"adamw_step": "pipipppil" + "f" * 9 + "i", "adam_direction": "ppppl" + "f" * 9 + "i"}


def load(device: torch.device) -> str:
    return native.description("adamw")


def adamw_(
    param: torch.Tensor,
    grad: torch.Tensor,
    mu: torch.Tensor,
    nu: torch.Tensor,
    copy: torch.Tensor | None,
    step: Step,
    scale: torch.Tensor | None,
) -> None:
    narrow = -1 if copy is None else native.DTYPES[copy.dtype]
    dtypes = native.DTYPES[param.dtype], native.DTYPES[grad.dtype]
    buffers = (param, dtypes[0], grad, dtypes[1], mu, nu, copy, narrow, param.numel())
    _library().adamw_step(*buffers, *step, 1.0 if scale is None else float(scale), threads())


def adam_direction_(
    param: torch.Tensor,
    grad: torch.Tensor,
    mu: torch.Tensor,
    nu: torch.Tensor,
    step: Direction,
    scale: torch.Tensor | None,
) -> None:
    factor = 1.0 if scale is None else float(scale)
    _library().adam_direction(param, grad, mu, nu, param.numel(), *step, factor, threads())


def _library() -> Any:
    return native.cpp_functions("adamw", _SIGNATURES)
