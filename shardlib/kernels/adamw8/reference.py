"""AdamW with moments in 8 bits in plain torch: the oracle of the kernels, and the fallback. Supports every dtype.

See `shardlib.kernels.adamw8.op` for the mathematics.
"""

from __future__ import annotations

import torch

from shardlib.kernels.adamw import reference as adamw
from shardlib.kernels.adamw.arguments import Step
from shardlib.kernels.adamw8.arguments import CodedStep
from shardlib.kernels.adamw8.codes import SIGNED, UNSIGNED


def load(device: torch.device) -> str:
    return "reference"


def adamw8_(step: CodedStep) -> None:
    param, grad, mu, mu_scales, nu, nu_scales, copy, factors, scale = step
    wide = torch.float64 if param.dtype == torch.float64 else torch.float32
    m, v = SIGNED.decode(mu, mu_scales).to(wide), UNSIGNED.decode(nu, nu_scales).to(wide)
    adamw.adamw_(Step(param, grad, m, v, copy, factors, scale))
    for codes, scales, (new, largest) in ((mu, mu_scales, SIGNED.encode(m)), (nu, nu_scales, UNSIGNED.encode(v))):
        codes.copy_(new)
        scales.copy_(largest)
