"""AdamW: m ← β1·m + (1−β1)·g;  v ← β2·v + (1−β2)·g²;  p ← p·(1 − η·λ) − η·m̂/(√v̂ + ε), with bias-corrected m̂, v̂.

(arXiv 1711.05101, algorithm 2.) One pass moves 28 bytes per element in fp32: p, m, v read and written, g read.
torch's fused kernel is at the memory ceiling for that on CPU and on CUDA, so it is used there (a gradient of another
dtype is cast first); other devices take the plain formula.
"""

from __future__ import annotations

import torch

from shardlib.kernels.dispatch import choose

IMPLEMENTATIONS = {"cpu": ("torch",), "cuda": ("torch",)}


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
    choose("adamw", param.device).module.adamw_(
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
