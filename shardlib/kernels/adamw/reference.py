"""AdamW in plain torch, one operation at a time: the oracle of the kernels, and the fallback. Supports every dtype.

See `shardlib.kernels.adamw.op` for the mathematics.
"""

from __future__ import annotations

import torch

from shardlib.common.chunks import chunks
from shardlib.kernels.adamw.arguments import Direction, DirectionFactors, Factors, Step


def load(device: torch.device) -> str:
    return "reference"


def adamw_(step: Step) -> None:
    param, grad, mu, nu, copy, factors, scale = step
    for p, g, m, v, *narrow in chunks([param, grad, mu, nu] if copy is None else [param, grad, mu, nu, copy]):
        _step(Step(p, g, m, v, narrow[0] if narrow else None, factors, scale))


def _step(step: Step) -> None:
    param, grad, mu, nu, copy, factors, scale = step
    m, v, moved = changes(grad, mu, nu, factors, scale)
    p = param.to(m.dtype) * factors.decay - moved
    for target, value in ((mu, m), (nu, v), (param, p), (copy, p)):
        if target is not None:
            target.copy_(value)


def changes(
    grad: torch.Tensor, mu: torch.Tensor, nu: torch.Tensor, factors: Factors, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Both moments after a step, and what the step subtracts from the decayed parameter; new tensors, fp32 at least."""
    wide = torch.promote_types(mu.dtype, torch.float32)
    g = grad.to(wide) if scale is None else grad.to(wide) * scale
    m, v = _moments(g, mu.to(wide), nu.to(wide), factors)
    return m, v, _ratio(m, v, factors)


def adam_direction_(direction: Direction) -> None:
    param, grad, mu, nu, factors, scale = direction
    m, v = _moments(grad if scale is None else grad * scale, mu, nu, factors)
    mu.copy_(m)
    nu.copy_(v)
    grad.copy_(_ratio(m, v, factors) + param * factors.weight_decay)


def _moments(
    g: torch.Tensor, m: torch.Tensor, v: torch.Tensor, factors: Factors | DirectionFactors
) -> tuple[torch.Tensor, torch.Tensor]:
    # Each product is rounded before it is added, which torch.add(..., alpha=) does not do.
    return m * factors.b1 + g * factors.rest1, v * factors.b2 + g * g * factors.rest2


def _ratio(m: torch.Tensor, v: torch.Tensor, factors: Factors | DirectionFactors) -> torch.Tensor:
    root = v.to(torch.float64).sqrt().to(v.dtype)  # torch's fp32 root is not always correctly rounded
    return m * factors.size / (root * factors.root + factors.eps)
