"""The first half of a decoder's layer as one operation after the other."""

from __future__ import annotations

import torch

from shardlib.kernels.cached_attention import cached_attention
from shardlib.kernels.decoder_attention.arguments import Heads, Seats


def load(device: torch.device) -> str:
    return "reference"


def apply(
    x: torch.Tensor,
    layer: Heads,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    seats: Seats,
) -> torch.Tensor:
    given = (*layer.of(x, cos, sin), keys, values, seats.rows, seats.starts)
    return layer.after(x, cached_attention(*given, window=layer.window))
