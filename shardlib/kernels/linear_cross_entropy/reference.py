"""Cross entropy of logits and its gradient in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from shardlib.kernels.common import rows
from shardlib.kernels.linear_cross_entropy.arguments import Aim


def load(device: torch.device) -> str:
    return "reference"


def losses_(logits: torch.Tensor, aim: Aim, gradients: bool) -> torch.Tensor:
    """The loss of each row; replaces ``logits`` by their gradients if ``gradients`` are asked for."""
    z = rows.wide(logits)
    options = {"ignore_index": aim.ignore_index, "label_smoothing": aim.label_smoothing}
    losses = F.cross_entropy(z, aim.targets, **options, reduction="none")  # type: ignore[arg-type]
    if gradients:
        logits.copy_(_slope(z, aim))
    return losses


def backward(x: torch.Tensor, weight: torch.Tensor, aim: Aim, dtotal: torch.Tensor) -> list[torch.Tensor]:
    """The gradients of x and W, computed with all logits in memory."""
    dz = (dtotal * _slope(rows.wide(x @ weight.t()), aim)).to(x.dtype)
    return [dz @ weight, dz.t() @ x]


def _slope(z: torch.Tensor, aim: Aim) -> torch.Tensor:
    targets, ignore_index, label_smoothing = aim
    counts = (targets != ignore_index)[:, None]
    onehot = F.one_hot(targets.where(counts[:, 0], 0), z.shape[1]).to(z.dtype)  # integers would be scaled in fp32
    return (torch.softmax(z, -1) - (1 - label_smoothing) * onehot - label_smoothing / z.shape[1]) * counts
