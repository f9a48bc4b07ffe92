"""AdamW with moments in 8 bits on the CPU, by adamw8.cpp."""

from __future__ import annotations

import torch

from shardlib.kernels.adamw.step import Step
from shardlib.kernels.adamw8.codes import SIGNED, UNSIGNED
from shardlib.kernels.common import native
from shardlib.kernels.common.thresholds import threads

_SIGNATURES = {"adamw8_step": "pipi" + "p" * 5 + "ippl" + "f" * 9 + "i"}


def load(device: torch.device) -> str:
    return native.description("adamw8")


def adamw8_(
    param: torch.Tensor,
    grad: torch.Tensor,
    mu: torch.Tensor,
    mu_scales: torch.Tensor,
    nu: torch.Tensor,
    nu_scales: torch.Tensor,
    copy: torch.Tensor | None,
    step: Step,
    scale: torch.Tensor | None,
) -> None:
    dtypes = native.DTYPES[param.dtype], native.DTYPES[grad.dtype]
    narrow = -1 if copy is None else native.DTYPES[copy.dtype]
    buffers = (param, dtypes[0], grad, dtypes[1], mu, mu_scales, nu, nu_scales, copy)
    lines = (SIGNED.lines(param.device), UNSIGNED.lines(param.device))
    factor = 1.0 if scale is None else float(scale)
    library = native.cpp_functions("adamw8", _SIGNATURES)
    library.adamw8_step(*buffers, narrow, *lines, param.numel(), *step, factor, threads())
