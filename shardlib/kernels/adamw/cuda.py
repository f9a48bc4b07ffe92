"""AdamW on NVIDIA GPUs, by adamw.cu."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch

from shardlib.kernels.adamw.step import Direction, Step
from shardlib.kernels.common import native

_SIGNATURES = {"adamw_step": "pipipppil" + "f" * 8 + "pp", "adam_direction": "ppppl" + "f" * 8 + "pp"}


def load(device: torch.device) -> str:
    _library()
    return "CUDA C++"


def adamw_(
    param: torch.Tensor,
    grad: torch.Tensor,
    mu: torch.Tensor,
    nu: torch.Tensor,
    copy: torch.Tensor | None,
    step: Step,
    scale: torch.Tensor | None,
) -> None:
    dtypes = native.DTYPES[param.dtype], native.DTYPES[grad.dtype]
    narrow = -1 if copy is None else native.DTYPES[copy.dtype]
    buffers = (param, dtypes[0], grad, dtypes[1], mu, nu, copy, narrow, param.numel())
    _library().adamw_step(*buffers, *step, scale, native.stream(param.device))


def adam_direction_(
    param: torch.Tensor,
    grad: torch.Tensor,
    mu: torch.Tensor,
    nu: torch.Tensor,
    step: Direction,
    scale: torch.Tensor | None,
) -> None:
    _library().adam_direction(param, grad, mu, nu, param.numel(), *step, scale, native.stream(param.device))


def _library() -> Any:
    return _functions(native.cuda_path("adamw"))


@functools.cache
def _functions(path: Path) -> Any:
    return native.functions(path, _SIGNATURES, checked=True)
