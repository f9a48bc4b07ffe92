"""AdamW in plain torch, one operation at a time: the oracle of the kernels, and the fallback. Serves every dtype.

See `shardlib.kernels.adamw.op` for what it does.
"""

from __future__ import annotations

import torch

from shardlib.kernels.adamw.step import Step


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
    root = v.to(torch.float64).sqrt().to(wide)  # torch's own fp32 root is not always the nearest
    p = param.to(wide) * step.decay - m * step.size / (root * step.root + step.eps)
    for kept, value in ((mu, m), (nu, v), (param, p), (copy, p)):
        if kept is not None:
            kept.copy_(value)
