"""The second half of a decoder's layer as one operation after the other."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from shardlib.kernels.decoder_mlp.arguments import MLP, Choice
from shardlib.kernels.grouped_matmul import grouped_matmul
from shardlib.kernels.permute import permute, unpermute
from shardlib.kernels.routing import by_expert


def load(device: torch.device) -> str:
    return "reference"


def apply(x: torch.Tensor, layer: MLP) -> torch.Tensor:
    normed = F.rms_norm(x, x.shape[-1:], layer.norm, layer.eps)
    if layer.choice is not None:
        return x + _experts(normed, layer, layer.choice)
    assert layer.up is not None
    return x + layer.down(F.silu(layer.gate(normed)).mul_(layer.up(normed)))


def _experts(x: torch.Tensor, layer: MLP, choice: Choice) -> torch.Tensor:
    experts, weights = choice.of(x)
    counts, positions = by_expert(experts, len(choice.router))
    ends = counts.cumsum(0)
    both: Any = layer.gate.weight
    down: Any = layer.down.weight
    gate, up = grouped_matmul(permute(x, positions), both, ends).chunk(2, -1)
    rows = grouped_matmul(F.silu(gate).mul_(up), down, ends)
    return unpermute(rows, positions, weights).to(x.dtype)
