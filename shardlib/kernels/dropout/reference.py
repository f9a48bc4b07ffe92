"""Dropout from a counter in plain torch."""

from __future__ import annotations

import torch

from shardlib.kernels.common import rows
from shardlib.kernels.counter.reference import random_bits
from shardlib.kernels.dropout.arguments import Draw


def load(device: torch.device) -> str:
    return "reference"


def forward(x: torch.Tensor, residual: torch.Tensor | None, bias: torch.Tensor | None, draw: Draw) -> torch.Tensor:
    z = rows.wide(x) if bias is None else rows.wide(x) + bias
    y = z * _factor(z, draw)
    return (y if residual is None else y + residual).to(x.dtype).contiguous()


def backward(bias: torch.Tensor | None, draw: Draw, dy: torch.Tensor) -> list[torch.Tensor]:
    dz = rows.wide(dy)
    dz = dz * _factor(dz, draw)
    return [dz.to(dy.dtype)] if bias is None else [dz.to(dy.dtype), rows.total(dz).to(bias.dtype)]


def _factor(x: torch.Tensor, draw: Draw) -> torch.Tensor:
    """0 where an element is dropped, 1 / (1 − p) where it is kept."""
    if draw.starts is None:
        index = torch.arange(draw.start, draw.start + x.numel(), device=x.device)
    else:
        index = (draw.starts.reshape(-1, 1) + torch.arange(x.shape[-1], device=x.device)).flatten()
    keep = random_bits(draw.seed, index) >= int(draw.p * 2**24)
    return (keep.to(x.dtype) / (1.0 - draw.p)).reshape(x.shape)
