"""SwiGLU in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from shardlib.kernels.common import rows


def load(device: torch.device) -> str:
    return "reference"


def forward(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return (F.silu(rows.wide(gate)) * up).to(gate.dtype).contiguous()


def backward(gate: torch.Tensor, up: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    g, d = rows.wide(gate), rows.wide(dy)
    s = torch.sigmoid(g)
    gradients = d * up * s * (1 + g * (1 - s)), d * g * s
    return [gradient.to(gate.dtype).contiguous() for gradient in gradients]
