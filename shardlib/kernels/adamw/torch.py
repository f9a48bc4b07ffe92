"""AdamW by torch's fused kernel."""

from __future__ import annotations

import torch


def load(device: torch.device) -> str:
    return "torch fused"


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
    if scale is not None and grad.dtype == torch.float64:
        # The kernel takes its scale in fp32.
        grad, scale = grad.mul_(scale), None
    torch._fused_adamw_(
        [param],
        [grad],
        [mu],
        [nu],
        [],
        [count],
        lr=lr,
        beta1=b1,
        beta2=b2,
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
        grad_scale=None if scale is None else scale.reciprocal().to(torch.float32),
    )
