"""Products of few rows in plain torch, which makes a quantised matrix whole first."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from shardlib.kernels.quantize import dequantize
from shardlib.kernels.thin_matmul.arguments import Matrix


def load(device: torch.device) -> str:
    return "reference"


def product(x: torch.Tensor, weight: torch.Tensor | Matrix, bias: torch.Tensor | None) -> torch.Tensor:
    return F.linear(x, whole(weight) if isinstance(weight, Matrix) else weight, bias)


def whole(weight: Matrix) -> torch.Tensor:
    """The weight that the values stand for, ``[outputs, inputs]``."""
    flat = dequantize(weight.values, weight.scales, weight.form, weight.shape.numel())
    return flat.view(weight.shape).to(weight.dtype)
