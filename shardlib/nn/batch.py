"""Losses over the rows of all ranks: contrastive losses, in-batch negatives, statistics of the whole batch."""

from __future__ import annotations

from typing import Protocol

import torch

from shardlib.common.environment import environment


class BatchRows(Protocol):
    """The implementation of `gather_batch` on a mesh."""

    def gather(self, x: torch.Tensor, dim: int) -> torch.Tensor: ...


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
    rows: BatchRows | None = environment().rows
    return x if rows is None else rows.gather(x, dim)
