"""Cross entropy of logits and its gradient on the CPU, by linear_cross_entropy.cpp."""

from __future__ import annotations

from typing import Any

import torch

from shardlib.common.thresholds import threads
from shardlib.kernels.common import native
from shardlib.kernels.linear_cross_entropy.arguments import Aim
from shardlib.kernels.linear_cross_entropy.options import refuse_unknown

_NAME = "linear_cross_entropy"
_SIGNATURES = {"cross_entropy": "piplfillpi"}


def load(device: torch.device) -> str:
    return native.description(_NAME)


def losses_(logits: torch.Tensor, aim: Aim, gradients: bool) -> torch.Tensor:
    z = native.readable(logits)
    losses = torch.empty(len(z))
    where = (*z.shape, losses, threads())
    targets, *options = aim
    _library().cross_entropy(z, native.DTYPES[z.dtype], targets.contiguous(), *options, gradients, *where)
    if losses.isnan().any():
        refuse_unknown(targets, z.shape[1], aim.ignore_index)
    if gradients and z is not logits:
        logits.copy_(z)
    return losses


def _library() -> Any:
    return native.cpp_functions(_NAME, _SIGNATURES)
