"""LayerNorm and RMSNorm in plain torch."""

from __future__ import annotations

import torch

from shardlib.kernels.common import rows


def load(device: torch.device) -> str:
    return "reference"


def forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, centred: bool
) -> torch.Tensor:
    y = _normed(x, eps, centred)[0] * weight
    return (y if bias is None else y + bias).to(x.dtype)


def forward_of_sum(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    centred: bool,
) -> list[torch.Tensor]:
    total = (x + residual).contiguous()
    return [forward(total, weight, bias, eps, centred), total]


def backward(
    total: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    centred: bool,
    dy: torch.Tensor,
    dtotal: torch.Tensor | None,
) -> list[torch.Tensor]:
    normed, rho = _normed(total, eps, centred)
    dy = rows.wide(dy)
    g = dy * weight
    ds = g - normed * (g * normed).mean(-1, keepdim=True)
    if centred:
        ds = ds - g.mean(-1, keepdim=True)
    ds = ds * rho if dtotal is None else ds * rho + dtotal
    found = [ds.to(total.dtype), rows.total(dy * normed).to(weight.dtype)]
    return found if bias is None else [*found, rows.total(dy).to(bias.dtype)]


def _normed(x: torch.Tensor, eps: float, centred: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """ŝ and ρ."""
    x = rows.wide(x)
    if centred:
        x = x - x.mean(-1, keepdim=True)
    rho = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    return x * rho, rho
