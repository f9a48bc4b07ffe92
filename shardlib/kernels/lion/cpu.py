"""Lion on the CPU, by lion.cpp."""

from __future__ import annotations

from typing import Any

import torch

from shardlib.common.thresholds import threads
from shardlib.kernels.common import native
from shardlib.kernels.lion.arguments import Old, Step

READS_OLD = True  # states may be read elsewhere than they are written

_SIGNATURES = {"lion_step": "pppipippil" + "f" * 7 + "i"}


def load(device: torch.device) -> str:
    return native.description("lion")


def lion_(step: Step, old: Old | None = None) -> None:
    param, grad, mu, copy, factors, scale = step
    buffers = (*(old or (param, mu)), *native.typed(param, grad), mu, *native.copied(copy))
    _library().lion_step(*buffers, param.numel(), *factors, native.factor(scale), threads())


def _library() -> Any:
    return native.cpp_functions("lion", _SIGNATURES)
