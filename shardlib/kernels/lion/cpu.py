"""Lion on the CPU, by lion.cpp."""

from __future__ import annotations

from typing import Any

import torch

from shardlib.kernels.common import native
from shardlib.kernels.common.thresholds import threads
from shardlib.kernels.lion.reference import Step

_SIGNATURES = {"lion_step": "pipippil" + "f" * 7 + "i"}


def load(device: torch.device) -> str:
    return native.description("lion")


def lion_(
    param: torch.Tensor,
    grad: torch.Tensor,
    mu: torch.Tensor,
    copy: torch.Tensor | None,
    step: Step,
    scale: torch.Tensor | None,
) -> None:
    narrow = -1 if copy is None else native.DTYPES[copy.dtype]
    dtypes = native.DTYPES[param.dtype], native.DTYPES[grad.dtype]
    buffers = (param, dtypes[0], grad, dtypes[1], mu, copy, narrow, param.numel())
    _library().lion_step(*buffers, *step, 1.0 if scale is None else float(scale), threads())


def _library() -> Any:
    return native.cpp_functions("lion", _SIGNATURES)
