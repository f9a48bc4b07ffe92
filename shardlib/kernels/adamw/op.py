"""AdamW: m ← β1·m + (1−β1)·g;  v ← β2·v + (1−β2)·g²;  p ← p·(1 − η·λ) − η·m̂/(√v̂ + ε), with bias-corrected m̂, v̂.

(arXiv 1711.05101, algorithm 2.) One pass moves 28 bytes per element in fp32: p, m, v read and written, g read.
torch's fused kernel is at the memory ceiling for that on CPU and on CUDA, so it is used there (a gradient of another
dtype is cast first); other devices take the plain formula.
"""

from __future__ import annotations

import torch

from shardlib.kernels.adamw import reference


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
    scale: torch.Tensor | None = None,
) -> None:
    """One AdamW step in place on flat tensors of one shape. May overwrite ``grad``.

    Args:
        count: the step's number from 1, a 0-d float tensor.
        lr: 0-d float tensor.
        scale: multiplies the gradient first (unscaling and clipping folded into the pass).
    """
    step = _fused if implementation(param.device) == "torch fused" else reference.adamw_
    step(
        param,
        grad.to(param.dtype),
        mu,
        nu,
        count=count,
        lr=lr,
        b1=b1,
        b2=b2,
        eps=eps,
        weight_decay=weight_decay,
        scale=scale,
    )


def implementation(device: torch.device) -> str:
    """Which implementation serves a device: "torch fused" or "reference"."""
    return "torch fused" if device.type in ("cpu", "cuda") else "reference"


def _fused(
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
