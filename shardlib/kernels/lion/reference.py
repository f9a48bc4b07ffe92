"""Lion in plain torch, one operation at a time: the oracle of the kernels, and the fallback. Serves every dtype.

See `shardlib.kernels.lion.op` for what it does.
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
    """The mean after a step, and what it takes from the parameter beside its decay; new, and fp32 at least."""
    wide = torch.promote_types(mu.dtype, torch.float32)
    g = grad.to(wide) if scale is None else grad.to(wide) * scale
    m = mu.to(wide)
    # Each product is rounded before it is added: torch's own sums with a factor are not.
    moved = _sign(m * factors.b1 + g * factors.rest1) * factors.size
    return m * factors.b2 + g * factors.rest2, moved


def _sign(x: torch.Tensor) -> torch.Tensor:
    """−1, 0 or 1; NaN of NaN, which torch's own takes for 0."""
    return torch.where(x == x, x.sign(), x)
