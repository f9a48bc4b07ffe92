"""Σ x² on NVIDIA GPUs, by global_norm.cu."""

from __future__ import annotations

from typing import Any

import torch

from shardlib.kernels.common import native

_TILE = 8192  # as in global_norm.cuh
_SIGNATURES = {"sum_of_squares": "pilppp"}


def load(device: torch.device) -> str:
    _library()
    return "CUDA C++"


def sum_of_squares(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty((), dtype=torch.float64, device=x.device)
    partial = torch.empty(-(-x.numel() // _TILE), dtype=torch.float64, device=x.device)
    _library().sum_of_squares(x, native.DTYPES[x.dtype], x.numel(), partial, out, native.stream(x.device))
    return out


def _library() -> Any:
    return native.cuda_functions("global_norm", _SIGNATURES)
