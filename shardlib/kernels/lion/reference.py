"""Lion in plain torch, one operation at a time: the oracle of the kernels, and the fallback. Serves every dtype.

See `shardlib.kernels.lion.op` for what it does.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Step(NamedTuple):
    """What a step multiplies by."""

    b1: float
    rest1: float
    b2: float
    rest2: float
    decay: float
    size: float


def load(device: torch.device) -> str:
    return "reference"


def sign(x: torch.Tensor) -> torch.Tensor:
    """−1, 0 or 1; NaN of NaN, which torch's own takes for 0."""
    return torch.where(x == x, x.sign(), x)


def lion_(
    param: torch.Tensor,
    grad: torch.Tensor,
    mu: torch.Tensor,
    copy: torch.Tensor | None,
    step: Step,
    scale: torch.Tensor | None,
) -> None:
    wide = torch.float64 if param.dtype == torch.float64 else torch.float32
    g = grad.to(wide) if scale is None else grad.to(wide) * scale
    m = mu.to(wide)
    # Each product is rounded before it is added: torch's own sums with a factor are not.
    p = param.to(wide) * step.decay - sign(m * step.b1 + g * step.rest1) * step.size
    mu.copy_(m * step.b2 + g * step.rest2)
    param.copy_(p)
    if copy is not None:
        copy.copy_(p)
