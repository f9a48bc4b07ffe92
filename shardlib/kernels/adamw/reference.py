"""AdamW in plain torch, one operation at a time: the oracle of the fused kernels, and the fallback."""

from __future__ import annotations

import torch


def load(device: torch.device) -> str:
    return "reference"


def adamw_(
    param: torch.Tensor,
    grad: torch.Tensor,
    mu: torch.Tensor,
    nu: torch.Tensor,
    *,
    count: torch.Tensor,
    lr: torch.Tensor,
    b1: float,
    b2: float,
    eps: float,
    weight_decay: float,
    scale: torch.Tensor | None,
) -> None:
    """See `shardlib.kernels.adamw.op.adamw_`."""
    g = grad if scale is None else grad * scale
    count = count.to(torch.float64)  # 1 − β2 loses most of its digits in fp32
    mu.mul_(b1).add_(g, alpha=1 - b1)
    nu.mul_(b2).addcmul_(g, g, value=1 - b2)
    denominator = (nu / (1 - b2**count)).sqrt_().add_(eps)
    param.mul_(1 - lr * weight_decay).sub_(lr * (mu / (1 - b1**count)) / denominator)
