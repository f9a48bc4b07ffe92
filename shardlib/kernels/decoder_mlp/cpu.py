"""The second half of a decoder's layer on the CPU, for few tokens by decoder_mlp.cpp."""

from __future__ import annotations

from typing import Any

import torch

from shardlib.common.thresholds import threads
from shardlib.kernels.common import native
from shardlib.kernels.decoder_mlp import reference
from shardlib.kernels.decoder_mlp.arguments import MLP
from shardlib.kernels.thin_matmul.cpu import FEW

_SIGNATURES = {"decoder_mlp": "pilppflipi"}


def load(device: torch.device) -> str:
    return native.description("decoder_mlp")


def apply(x: torch.Tensor, layer: MLP) -> torch.Tensor:
    lines = layer.lines
    if lines is None or len(x) > FEW():
        return reference.apply(x, layer)
    x, y = x.contiguous(), torch.empty(x.shape, dtype=x.dtype)
    _, taken, renormalises = layer.choice or (None, 0, False)
    how = (lines, layer.norm, layer.eps, taken, int(renormalises))
    _library().decoder_mlp(x, native.DTYPES[x.dtype], len(x), *how, y, threads())
    return y


def _library() -> Any:
    return native.cpp_functions("decoder_mlp", _SIGNATURES)
