"""Cross entropy over a vocabulary that is shared out over a mesh axis (Megatron-LM, arXiv 1909.08053, section 3)."""

from __future__ import annotations

import torch

from shardlib.collectives import primitives
from shardlib.collectives.pairs import all_reduce, exchange, mesh_with
from shardlib.mesh import Mesh


def vocab_cross_entropy(
    scores: torch.Tensor,
    targets: torch.Tensor,
    axis: str,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    mesh: Mesh | None = None,
) -> torch.Tensor:
    """``F.cross_entropy`` of scores whose last dimension is this rank's share of the vocabulary; never gathers them.

    Payload per token: one number gathered (the largest score), two summed.

    Args:
        scores: (..., vocabulary / ranks), rank r holding words r·V/n to (r+1)·V/n.
        targets: (...), int64, equal on all ranks of ``axis``.
        reduction: "mean", "sum" or "none".
    """
    mesh = mesh_with(mesh, axis)
    words = scores.shape[-1]
    highest = _highest(scores.detach(), mesh, axis)
    shifted = scores - highest[..., None]
    local = targets - words * mesh.coords[axis]
    mine = (local >= 0) & (local < words)
    wanted = shifted.gather(-1, local.where(mine, 0)[..., None])[..., 0].where(mine, 0)
    total, score = all_reduce(torch.stack([shifted.exp().sum(-1), wanted]), axis, dst="invariant", mesh=mesh).unbind()
    counts = targets != ignore_index
    losses = (total.log() - score).where(counts, 0)
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / counts.sum()


def _highest(scores: torch.Tensor, mesh: Mesh, axis: str) -> torch.Tensor:
    """The largest score over the whole vocabulary, outside any graph: it cancels out of the loss."""
    mine = scores.amax(-1)
    everyone = mine.new_empty((mesh.shape[axis], *mine.shape))
    exchange(primitives.all_gather, mesh, axis, everyone, mine.contiguous())
    return everyone.amax(0)
