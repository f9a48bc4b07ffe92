"""Lion on NVIDIA GPUs, by lion.cu."""

from __future__ import annotations

from typing import Any

import torch

from shardlib.kernels.common import native
from shardlib.kernels.lion.arguments import Step

_SIGNATURES = {"lion_step": "pipippil" + "f" * 6 + "pp"}


def load(device: torch.device) -> str:
    _library()
    return "CUDA C++"


def lion_(step: Step) -> None:
    param, grad, mu, copy, factors, scale = step
    buffers = (*native.typed(param, grad), mu, *native.copied(copy))
    _library().lion_step(*buffers, param.numel(), *factors, scale, native.stream(param.device))


def _library() -> Any:
    return native.cuda_functions("lion", _SIGNATURES)
