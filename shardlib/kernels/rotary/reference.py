"""Rotary position embedding in plain torch."""

from __future__ import annotations

import torch

from shardlib.kernels.common import rows


def load(device: torch.device) -> str:
    return "reference"


def turn(x: torch.Tensor, both: torch.Tensor, interleaved: bool, back: bool) -> torch.Tensor:
    cos, sin = both[0], -both[1] if back else both[1]
    half = cos.shape[1]
    turned, rest = rows.wide(x).split([2 * half, x.shape[-1] - 2 * half], -1)
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    pairs = [a * cos - b * sin, a * sin + b * cos]
    rotated = torch.stack(pairs, -1).flatten(-2) if interleaved else torch.cat(pairs, -1)
    return torch.cat([rotated, rest], -1).to(x.dtype)
