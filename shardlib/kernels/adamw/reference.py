"""AdamW in plain torch, one operation at a time: the oracle of the kernels, and the fallback. Serves every dtype.

See `shardlib.kernels.adamw.op` for what it does.
"""

from __future__ import annotations

import torch

from shardlib.kernels.adamw.step import Direction, Step


def load(device: torch.device) -> str:
    return "reference"


def adamw_(
    param: torch.Tensor,
    grad: torch.Tensor,
    mu: torch.Tensor,
    nu: torch.Tensor,
    copy: torch.Tensor | None,
    step: Step,
    scale: torch.Tensor | None,
) -> None:
    wide = torch.float64 if param.dtype == torch.float64 else torch.float32
    g = grad.to(wide) if scale is None else grad.to(wide) * scale
    # Each product is rounded before it is added: torch's own sums with a factor are not.
    m = mu.to(wide) * step.b1 + g * step.rest1
    v = nu.to(wide) * step.b2 + g * g * step.rest2
    p = param.to(wide) * step.decay - m * step.size / _denominator(v, step)
    for kept, value in ((mu, m), (nu, v), (param, p), (copy, p)):
        if kept is not None:
            kept.copy_(value)


def adam_direction_(
    param: torch.Tensor,
    grad: torch.Tensor,
    mu: torch.Tensor,
    nu: torch.Tensor,
    step: Direction,
    scale: torch.Tensor | None,
) -> None:
    g = grad if scale is None else grad * scale
    mu.mul_(step.b1).add_(g * step.rest1)
    nu.mul_(step.b2).add_(g * g * step.rest2)
    grad.copy_(mu * step.size / _denominator(nu, step) + param * step.weight_decay)


def _denominator(v: torch.Tensor, step: Step | Direction) -> torch.Tensor:
    root = v.to(torch.float64).sqrt().to(v.dtype)  # torch's own fp32 root is not always the nearest
    return root * step.root + step.eps
