"""Lion in plain torch, one operation at a time: the oracle of the kernels, and the fallback. Supports every dtype.

See `shardlib.kernels.lion.op` for the mathematics.
"""

from __future__ import annotations

import torch

from shardlib.kernels.lion.arguments import Factors, Step


def load(device: torch.device) -> str:
    return "reference"


def lion_(step: Step) -> None:
    param, grad, mu, copy, factors, scale = step
    m, moved = changes(grad, mu, factors, scale)
    p = param.to(m.dtype) * factors.decay - moved
    mu.copy_(m)
    param.copy_(p)
    if copy is not None:
        copy.copy_(p)


def changes(
    grad: torch.Tensor, mu: torch.Tensor, factors: Factors, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The momentum after a step, and what the step subtracts from the decayed parameter; new tensors, fp32 at least."""
    wide = torch.promote_types(mu.dtype, torch.float32)
    g = grad.to(wide) if scale is None else grad.to(wide) * scale
    m = mu.to(wide)
    # Each product is rounded before it is added, which torch.add(..., alpha=) does not do.
    moved = _sign(m * factors.b1 + g * factors.rest1) * factors.size
    return m * factors.b2 + g * factors.rest2, moved


def _sign(x: torch.Tensor) -> torch.Tensor:
    """The sign: −1, 0 or 1, and NaN of NaN, for which torch's is 0."""
    return torch.where(x == x, x.sign(), x)
