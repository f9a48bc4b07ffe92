"""Masked softmax in plain torch."""

from __future__ import annotations

import torch

from shardlib.kernels.common import rows


def load(device: torch.device) -> str:
    return "reference"


def forward(x: torch.Tensor, lengths: torch.Tensor | None, causal: bool, scale: float) -> torch.Tensor:
    hidden = torch.zeros(x.shape[-2:], dtype=torch.bool, device=x.device)
    if causal:
        hidden = ~torch.ones_like(hidden).tril()
    if lengths is not None:
        hidden = hidden | (torch.arange(x.shape[-1], device=x.device) >= lengths[:, None, None, None])
    scores = (rows.wide(x) * scale).masked_fill(hidden, -torch.inf)
    return torch.softmax(scores, -1).masked_fill(hidden, 0).to(x.dtype)


def backward(y: torch.Tensor, causal: bool, scale: float, dy: torch.Tensor) -> torch.Tensor:
    p, d = rows.wide(y), rows.wide(dy)
    return (scale * p * (d - (p * d).sum(-1, keepdim=True))).to(y.dtype)
