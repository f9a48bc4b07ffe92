"""Lion on NVIDIA GPUs, by lion.cu."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch

from shardlib.kernels.common import native
from shardlib.kernels.lion.reference import Step


def load(device: torch.device) -> str:
    _library()
    return "CUDA C++"


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
    _library().lion_step(*buffers, *step, scale, native.stream(param.device))


def _library() -> Any:
    return _functions(native.cuda_path("lion"))


@functools.cache
def _functions(path: Path) -> Any:
    return native.functions(path, {"lion_step": "pipippil" + "f" * 6 + "pp"}, checked=True)
