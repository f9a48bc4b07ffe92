"""What loss functions are made of: functions that know what to do with a sliced parameter and are plain PyTorch with a
whole one, and the mean that a loss may be given as.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.overrides import handle_torch_function, has_torch_function

from shardlib.kernels.common.arguments import check_tensors
from shardlib.kernels.common.thresholds import Threshold
from shardlib.kernels.linear_cross_entropy import linear_cross_entropy as chunked_cross_entropy
from shardlib.kernels.linear_cross_entropy.options import check_layer, check_options, check_targets, widened
from shardlib.nn.sequence import current_parts, shard_sequence

# Logits, from which on they are not kept: below, plain operations are as fast, and a zero-bubble backward can be split.
_MANY = Threshold(1 << 24)


class Mean(NamedTuple):
    """A mean given as a sum and a weight, both scalars; sums and weights add up over micro-batches and ranks.

    ``sl.Mean(losses.sum(), mask.sum())`` is the right loss for masked tokens. Weights are at least 0, and of a loss they
    depend on no parameter (detach them). Some ranks or micro-batches may weigh nothing, with ``sl.Mean(0, 0)`` where a
    metric has nothing to count. Where none of them weighs there is no mean: a train step refuses the batch or skips it
    (``nonfinite``), `value_and_grad` gives a loss and gradients of 0, a metric beside others that weigh is NaN.
    """

    total: Any
    weight: Any


def linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> torch.Tensor:
    """The cross entropy of an output layer: ``F.cross_entropy(F.linear(x, weight), targets)``, summed in fp32 or wider.

    Where `tensor_slicing` gives ``weight`` the style "vocab", each rank scores its own words and the logits are never
    gathered: two all-reduces of two numbers and one number per token take their place.

    Args:
        x: (..., width). Under a sequence plan (batch, part of the sequence, ..., width); the loss is still that of the
            whole sequence, on every rank.
        weight: (vocabulary, width).
        targets: (...), int64, whole; ``ignore_index`` counts for nothing.
        label_smoothing: how much of the target is spread over all words, in [0, 1]; as in ``F.cross_entropy``.
        reduction: "mean" over the targets that count, "sum", or "none" ((...), zero where ignored).

    Raises:
        ValueError: another reduction, a smoothing outside [0, 1], or shapes that do not fit.
        TypeError: what are no tensors, or not of dtypes that are served.

    >>> x, weight, targets = torch.zeros(2, 5, 8), torch.ones(16, 8), torch.zeros(2, 5, dtype=torch.int64)
    >>> sl.nn.linear_cross_entropy(x, weight, targets)  # ln 16
    tensor(2.7726)
    """
    function = "linear_cross_entropy"
    check_options(function, reduction, label_smoothing, ("mean", "sum", "none"))
    check_tensors(function, {"x": x, "weight": weight, "targets": targets}, exactly={"targets": torch.int64})
    options: dict[str, Any] = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    if has_torch_function((weight,)):
        given = (x, weight, targets)
        return handle_torch_function(linear_cross_entropy, (weight,), *given, **options, reduction=reduction)

    check_layer(function, x, weight)

    def losses(targets: torch.Tensor, reduction: str) -> torch.Tensor:
        if reduction != "none" and targets.numel() * len(weight) > _MANY():
            return chunked_cross_entropy(x, weight, targets, **options, reduction=reduction)
        scores = widened(F.linear(x, weight)).flatten(0, -2)
        found = F.cross_entropy(scores, targets.flatten(), **options, reduction=reduction)
        return found.view(targets.shape) if reduction == "none" else found

    parts = current_parts.get()
    if parts is None:
        check_targets(function, targets, x.shape[:-1], f"x of shape {tuple(x.shape)}")
        return losses(targets, reduction)
    return parts.loss(losses, x, targets, ignore_index, reduction)


def embedding(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``F.embedding(ids, weight)``; under a sequence plan this rank's part of it, along dimension 1.

    ``ids`` (batch, sequence) are whole. Where `tensor_slicing` cuts the vocabulary over the axis of the sequence, all
    ids are looked up and what is found is reduce-scattered; otherwise each rank looks up its own part.

    >>> sl.nn.embedding(torch.tensor([[1, 0, 1]]), torch.ones(2, 4)).shape
    torch.Size([1, 3, 4])
    """
    if has_torch_function((weight,)):
        return handle_torch_function(embedding, (weight,), ids, weight)
    return F.embedding(shard_sequence(ids), weight)


def own_slice(weight: torch.Tensor) -> torch.Tensor:
    """What is here of ``weight``, which `tensor_slicing` may have cut, for what works on slices of activations too."""
    return handle_torch_function(own_slice, (weight,), weight) if has_torch_function((weight,)) else weight


def slice_of(weight: torch.Tensor, dim: int = 0) -> tuple[int, int]:
    """Where what is here of ``weight`` begins along ``dim``, and how long all of it is: 0 and its length unless sliced."""
    if has_torch_function((weight,)):
        return handle_torch_function(slice_of, (weight,), weight, dim)
    return 0, weight.shape[dim]
