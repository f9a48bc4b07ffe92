"""Cross entropy of logits and its gradient in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from shardlib.kernels.common import rows


def load(device: torch.device) -> str:
    return "reference"


def losses_(
    logits: torch.Tensor, targets: torch.Tensor, ignore_index: int, label_smoothing: float, gradients: bool
) -> torch.Tensor:
    """Per row; ``logits`` become their gradients, where those are asked for."""
    z = rows.wide(logits)
    losses = F.cross_entropy(z, targets, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="none")
    if gradients:
        logits.copy_(_slope(z, targets, ignore_index, label_smoothing))
    return losses


def backward(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    dtotal: torch.Tensor,
) -> list[torch.Tensor]:
    """With all logits at once."""
    dz = (dtotal * _slope(rows.wide(x @ weight.t()), targets, ignore_index, label_smoothing)).to(x.dtype)
    return [dz @ weight, dz.t() @ x]


def _slope(z: torch.Tensor, targets: torch.Tensor, ignore_index: int, label_smoothing: float) -> torch.Tensor:
    counts = (targets != ignore_index)[:, None]
    onehot = F.one_hot(targets.where(counts[:, 0], 0), z.shape[1]).to(z.dtype)  # integers would be scaled in fp32
    return (torch.softmax(z, -1) - (1 - label_smoothing) * onehot - label_smoothing / z.shape[1]) * counts
