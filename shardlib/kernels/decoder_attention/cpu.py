"""The first half of a decoder's layer on the CPU, for few tokens by decoder_attention.cpp."""

from __future__ import annotations

from typing import Any

import torch

from shardlib.common.thresholds import threads
from shardlib.kernels.common import native
from shardlib.kernels.decoder_attention import reference
from shardlib.kernels.decoder_attention.arguments import Heads, Seats
from shardlib.kernels.thin_matmul.cpu import FEW

_SIGNATURES = {"decoder_attention": "pilppppfppppppllllpi"}


def load(device: torch.device) -> str:
    return native.description("decoder_attention")


def apply(
    x: torch.Tensor,
    layer: Heads,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    seats: Seats,
) -> torch.Tensor:
    lines = layer.lines
    if lines is None or len(x) > FEW():
        return reference.apply(x, layer, cos, sin, keys, values, seats)
    x, y = x.contiguous(), torch.empty(x.shape, dtype=x.dtype)
    _, heads, room, size = keys.shape
    _library().decoder_attention(
        *(x, native.DTYPES[x.dtype], len(x), lines, layer.norm, layer.q_norm, layer.k_norm, layer.eps),
        *(cos.contiguous(), sin.contiguous(), keys, values, seats.rows.contiguous(), seats.starts.contiguous()),
        *(heads, room, size, room if layer.window is None else layer.window, y, threads()),
    )
    return y


def _library() -> Any:
    return native.cpp_functions("decoder_attention", _SIGNATURES)
