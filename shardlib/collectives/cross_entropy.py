"""Cross entropy over a vocabulary that is shared out over a mesh axis (Megatron-LM, arXiv 1909.08053, section 3)."""

from __future__ import annotations

import torch

from shardlib.collectives import primitives
from shardlib.collectives.pairs import all_reduce, exchange, mesh_with
from shardlib.kernels.linear_cross_entropy.options import check_options, check_targets, refuse_unknown
from shardlib.mesh import Mesh


def vocab_cross_entropy(
    scores: torch.Tensor,
    targets: torch.Tensor,
    axis: str,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    mesh: Mesh | None = None,
) -> torch.Tensor:
    """``F.cross_entropy`` of scores whose last dimension is this rank's share of the vocabulary; never gathers them.

    Payload per token: one number gathered (the largest score), two summed, and a third with ``label_smoothing``.

    Args:
        scores: (..., vocabulary / ranks), rank r holding words r·V/n to (r+1)·V/n.
        targets: (...), int64, equal on all ranks of ``axis``.
        label_smoothing: how much of the target is spread over all words, in [0, 1].
        reduction: "mean", "sum" or "none".

    Raises:
        ValueError: another reduction, a smoothing outside [0, 1], or targets that do not suit the scores.
        TypeError: targets that are not int64.
        IndexError: on CPU, a target that is none of the words; on a GPU, which would have to wait, its loss is NaN.
    """
    check_options("vocab_cross_entropy", reduction, label_smoothing, ("mean", "sum", "none"))
    check_targets("vocab_cross_entropy", targets, scores.shape[:-1], f"scores of shape {tuple(scores.shape)}")
    mesh = mesh_with(mesh, axis)
    words = scores.shape[-1]
    whole = words * mesh.shape[axis]
    if targets.is_cpu and not mesh.abstract:
        refuse_unknown(targets, whole, ignore_index)
    highest = _highest(scores.detach(), mesh, axis)
    shifted = scores - highest[..., None]
    local = targets - words * mesh.coords[axis]
    mine = (local >= 0) & (local < words)
    wanted = shifted.gather(-1, local.where(mine, 0)[..., None])[..., 0].where(mine, 0)
    sums = torch.stack([shifted.exp().sum(-1), wanted, *([shifted.sum(-1)] if label_smoothing else [])])
    total, score, *plain = all_reduce(sums, axis, dst="invariant", mesh=mesh).unbind()
    losses = total.log() - (1 - label_smoothing) * score
    if plain:
        losses = losses - label_smoothing / whole * plain[0]
    counts = targets != ignore_index
    losses = losses.where((targets >= 0) & (targets < whole), torch.nan).where(counts, 0)
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / counts.sum()


def _highest(scores: torch.Tensor, mesh: Mesh, axis: str) -> torch.Tensor:
    """The largest score over the whole vocabulary, outside any graph: it cancels out of the loss."""
    mine = scores.amax(-1)
    everyone = mine.new_empty((mesh.shape[axis], *mine.shape))
    exchange(primitives.all_gather, mesh, axis, everyone, mine.contiguous())
    return everyone.amax(0)
