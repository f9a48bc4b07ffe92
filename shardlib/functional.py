"""Functions for loss functions that know what to do with a sliced parameter, and are plain PyTorch with a whole one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.overrides import handle_torch_function, has_torch_function


def linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> torch.Tensor:
    """The cross entropy of an output layer: ``F.cross_entropy(F.linear(x, weight), targets)``, summed in fp32 or wider.

    Where `tensor_slicing` gives ``weight`` the style "vocab", each rank scores its own words and the logits are never
    gathered: two all-reduces of two numbers and one number per token take their place.

    Args:
        x: (..., width).
        weight: (vocabulary, width).
        targets: (...), int64; ``ignore_index`` counts for nothing.
        reduction: "mean" over the targets that count, "sum", or "none" ((...), zero where ignored).
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"linear_cross_entropy(reduction={reduction!r}): use 'mean', 'sum' or 'none'")
    if has_torch_function((weight,)):
        return handle_torch_function(
            linear_cross_entropy, (weight,), x, weight, targets, ignore_index=ignore_index, reduction=reduction
        )
    scores = widened(F.linear(x, weight))
    losses = F.cross_entropy(scores.flatten(0, -2), targets.flatten(), ignore_index=ignore_index, reduction=reduction)
    return losses.view(targets.shape) if reduction == "none" else losses


def widened(scores: torch.Tensor) -> torch.Tensor:
    """In fp32 at least: the softmax sums a whole vocabulary, which costs digits that a loss cannot spare."""
    return scores.to(torch.promote_types(scores.dtype, torch.float32))
