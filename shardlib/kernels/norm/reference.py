"""LayerNorm and RMSNorm in plain torch."""

from __future__ import annotations

import torch

from shardlib.kernels.common import rows
from shardlib.kernels.norm.arguments import Norm


def load(device: torch.device) -> str:
    return "reference"


def forward(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    y = _normed(x, norm)[0] * norm.weight
    return (y if norm.bias is None else y + norm.bias).to(x.dtype)


def forward_of_sum(x: torch.Tensor, residual: torch.Tensor, norm: Norm) -> list[torch.Tensor]:
    total = (x + residual).contiguous()
    return [forward(total, norm), total]


def backward(total: torch.Tensor, norm: Norm, dy: torch.Tensor, dtotal: torch.Tensor | None) -> list[torch.Tensor]:
    weight, bias, _, centred = norm
    normed, rho = _normed(total, norm)
    dy = rows.wide(dy)
    g = dy * weight
    ds = g - normed * (g * normed).mean(-1, keepdim=True)
    if centred:
        ds = ds - g.mean(-1, keepdim=True)
    ds = ds * rho if dtotal is None else ds * rho + dtotal
    gradients = [ds.to(total.dtype), rows.total(dy * normed).to(weight.dtype)]
    return gradients if bias is None else [*gradients, rows.total(dy).to(bias.dtype)]


def _normed(x: torch.Tensor, norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
    """The normalised rows ŝ, and ρ."""
    x = rows.wide(x)
    if norm.centred:
        x = x - x.mean(-1, keepdim=True)
    rho = (x.square().mean(-1, keepdim=True) + norm.eps).rsqrt()
    return x * rho, rho
