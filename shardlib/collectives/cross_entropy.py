"""Cross entropy over a vocabulary that is split over a mesh axis (Megatron-LM, arXiv 1909.08053, section 3)."""

from __future__ import annotations

import torch

from shardlib.collectives.ops import mesh_with
from shardlib.collectives.pairs import all_gather, all_reduce
from shardlib.common._compat import traced
from shardlib.errors import SpecError
from shardlib.kernels.common.arguments import check_tensors
from shardlib.kernels.linear_cross_entropy import check_options, check_targets, refuse_unknown
from shardlib.mesh.mesh import Mesh
from shardlib.mesh.specs import chunk_size


def vocab_cross_entropy(
    scores: torch.Tensor,
    targets: torch.Tensor,
    axis: str,
    *,
    words: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    mesh: Mesh | None = None,
) -> torch.Tensor:
    """``F.cross_entropy`` of scores whose last dimension is this rank's share of the vocabulary. Never gathers the scores.

    Payload per token: one number gathered (the largest score), and two summed, or three with ``label_smoothing``.

    Args:
        scores: (..., s), where rank r holds the scores of words r·s to (r+1)·s.
        targets: (...), int64, equal on all ranks of ``axis``.
        words: the size of the vocabulary, if the number of ranks does not divide it. s is then ⌈words / ranks⌉; scores beyond
            the last word are ignored, and may be left out.
        label_smoothing: the share of the target that is spread over all words, in [0, 1].
        reduction: "mean", "sum" or "none".

    Raises:
        SpecError: ``scores`` are not this rank's share of ``words`` words.
        ValueError: another reduction, a smoothing outside [0, 1], or targets whose shape does not fit the scores.
        TypeError: targets that are not int64.
        IndexError: on the CPU, a target outside the vocabulary. On a GPU, which would have to wait, its loss is NaN instead,
            and in a graph.

    >>> def loss(mesh):
    ...     words = torch.zeros(3, 8).chunk(2, dim=1)[mesh.rank]  # of 8 words, this rank's 4
    ...     return sl.collectives.vocab_cross_entropy(words, torch.tensor([0, 5, 7]), "model")
    >>> sl.simulate(loss, mesh=dict(model=2))
    [tensor(2.0794), tensor(2.0794)]
    """
    check_options("vocab_cross_entropy", reduction, label_smoothing, ("mean", "sum", "none"))
    check_tensors("vocab_cross_entropy", {"scores": scores, "targets": targets}, exactly={"targets": torch.int64})
    check_targets("vocab_cross_entropy", targets, scores.shape[:-1], f"scores of shape {tuple(scores.shape)}")
    mesh = mesh_with(mesh, axis)
    words = scores.shape[-1] * mesh.shape[axis] if words is None else words
    if targets.is_cpu and not mesh.abstract and not traced(targets):
        refuse_unknown(targets, words, ignore_index)
    scores, first, held = _own_words(scores, words, mesh, axis)
    highest = _highest(scores.detach(), mesh, axis)
    shifted = scores - highest[..., None]
    local = (targets >= first) & (targets < first + held)
    wanted = shifted.gather(-1, (targets - first).where(local, 0)[..., None])[..., 0].where(local, 0)
    sums = [shifted.exp().sum(-1), wanted]
    if label_smoothing:
        sums.append(shifted.sum(-1) if held else torch.zeros_like(wanted))
    total, score, *plain = all_reduce(torch.stack(sums), axis, dst="invariant", mesh=mesh).unbind()
    losses = total.log() - (1 - label_smoothing) * score
    if plain:
        losses = losses - label_smoothing / words * plain[0]
    counts = targets != ignore_index
    losses = losses.where((targets >= 0) & (targets < words), torch.nan).where(counts, 0)
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / counts.sum()


def _own_words(scores: torch.Tensor, words: int, mesh: Mesh, axis: str) -> tuple[torch.Tensor, int, int]:
    """The scores of this rank's words, the first of these words, and their number."""
    share = chunk_size(words, mesh.shape[axis])
    first = min(share * mesh.coords[axis], words)
    held = min(share, words - first)
    if scores.shape[-1] not in (share, max(held, 1)):
        raise SpecError(
            f"vocab_cross_entropy got {scores.shape[-1]} scores, and {held} of {words} words are this rank's over "
            f"axis {axis!r}; pass words=, the whole vocabulary's size"
        )
    if not held:  # one score of −∞, of a word that is no target, so that there is a largest score
        return scores[..., :1].masked_fill(torch.ones_like(scores[..., :1], dtype=torch.bool), -torch.inf), first, held
    return scores[..., :held], first, held


def _highest(scores: torch.Tensor, mesh: Mesh, axis: str) -> torch.Tensor:
    """The largest score over the whole vocabulary, outside any graph, since it cancels out of the loss."""
    return all_gather(scores.amax(-1)[None], axis, mesh=mesh).amax(0)
