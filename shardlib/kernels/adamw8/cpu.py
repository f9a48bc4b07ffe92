"""AdamW with moments in 8 bits on the CPU, by adamw8.cpp."""

from __future__ import annotations

import torch

from shardlib.common.thresholds import threads
from shardlib.kernels.adamw8.arguments import CodedStep
from shardlib.kernels.adamw8.codes import SIGNED, UNSIGNED
from shardlib.kernels.common import native

_SIGNATURES = {"adamw8_step": "pipi" + "p" * 5 + "ippl" + "f" * 9 + "i"}


def load(device: torch.device) -> str:
    return native.description("adamw8")


def adamw8_(step: CodedStep) -> None:
    param, grad, mu, mu_scales, nu, nu_scales, copy, factors, scale = step
    buffers = (*native.typed(param, grad), mu, mu_scales, nu, nu_scales)
    lines = (SIGNED.lines(param.device), UNSIGNED.lines(param.device))
    where = (*native.copied(copy), *lines, param.numel())
    library = native.cpp_functions("adamw8", _SIGNATURES)
    library.adamw8_step(*buffers, *where, *factors, native.factor(scale), threads())
