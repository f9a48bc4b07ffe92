"""Bias + GeLU in plain torch."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from shardlib.kernels.common import rows


def load(device: torch.device) -> str:
    return "reference"


def forward(x: torch.Tensor, bias: torch.Tensor | None, tanh: bool) -> torch.Tensor:
    return F.gelu(_sum(x, bias), approximate="tanh" if tanh else "none").to(x.dtype)


def backward(x: torch.Tensor, bias: torch.Tensor | None, tanh: bool, dy: torch.Tensor) -> list[torch.Tensor]:
    z = _sum(x, bias)
    if tanh:
        s = torch.sigmoid(math.sqrt(8 / math.pi) * (z + 0.044715 * z**3))
        slope = s + z * s * (1 - s) * math.sqrt(8 / math.pi) * (1 + 3 * 0.044715 * z**2)
    else:
        slope = torch.special.ndtr(z) + z * torch.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
    dz = dy * slope
    return [dz.to(x.dtype)] if bias is None else [dz.to(x.dtype), rows.total(dz).to(bias.dtype)]


def _sum(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return rows.wide(x) if bias is None else rows.wide(x) + bias
