"""Functions for models whose activations may be sequence parts: plain PyTorch where there is no sequence plan.

Under `shardlib.sequence` every activation outside a sliced layer holds this rank's part of the sequence, along
dimension 1 (batch, sequence, ...), whereas batches have the whole sequence. A model takes its part by `shard_sequence` (or
`embedding`), mixes positions only by `attention`, and ends with `linear_cross_entropy`, `sum_sequence` or `gather_sequence`.
"""

from __future__ import annotations

import torch

from shardlib.common.environment import environment


def shard_sequence(x: torch.Tensor, dim: int = 1) -> torch.Tensor:
    """This rank's sequence part, along ``dim``, of an ``x`` that is whole on every rank; ``x`` itself without a sequence
    plan.

    The part may be several chunks: under kind="ring" two, equally far from either end of the sequence. Backward fills in
    zeros for the other ranks' parts, since gradients of parameters are partial sums that are summed over the axis once.

    Raises:
        SpecError: the length does not divide over the axis.

    >>> x = torch.ones(2, 8)
    >>> sl.nn.shard_sequence(x) is x
    True
    """
    parts = environment().parts
    return x if parts is None else parts.shard(x, dim)


def gather_sequence(x: torch.Tensor, dim: int = 1) -> torch.Tensor:
    """The whole sequence from every rank's part ``x`` along ``dim``, in order; ``x`` itself without a sequence plan.

    For logits to look at, and for losses without parameters. All ranks must compute the same from the result, and may not
    apply a trained parameter to it, whose gradient every rank would then count.

    >>> x = torch.ones(2, 8)
    >>> sl.nn.gather_sequence(x) is x
    True
    """
    parts = environment().parts
    return x if parts is None else parts.gather(x, dim)


def sum_sequence(x: torch.Tensor) -> torch.Tensor:
    """The sum of the ranks' ``x`` over their sequence parts, equal on all ranks; ``x`` itself without a sequence plan.

    For losses of one's own: ``sum_sequence(losses.sum()) / sum_sequence(mask.sum())``.

    >>> float(sl.nn.sum_sequence(torch.tensor(3.0)))
    3.0
    """
    parts = environment().parts
    return x if parts is None else parts.sum(x)


# Losses over the rows of all ranks: contrastive losses, in-batch negatives, statistics of the whole batch.


def gather_batch(x: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """The rows of all ranks' ``x`` along ``dim``, in the order of the global batch; ``x`` itself on one device.

    The mean over ranks of a loss of the gathered rows has one device's gradient, whether every rank computes the whole loss,
    or that of its own rows against all others. Ranks may have different numbers of rows. Backward reduce-scatters.

    Every rank calls it equally often. In an eval step it gathers the rows of one batch.

    Raises:
        LossError: a plan with micro-batches, each of which would meet its own rows alone: see docs/training.md.

    >>> images, texts = torch.eye(4), torch.eye(4)
    >>> scores = sl.nn.gather_batch(images) @ sl.nn.gather_batch(texts).t()
    >>> torch.nn.functional.cross_entropy(scores, torch.arange(len(scores)))
    tensor(0.7437)
    """
    rows = environment().rows
    return x if rows is None else rows.gather(x, dim)
