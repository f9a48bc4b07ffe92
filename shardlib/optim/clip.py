"""Clipping by the global norm."""

from __future__ import annotations

import torch

from shardlib.optim.base import GradientTransformation, empty_init, scaled
from shardlib.optim.locality import Locality
from shardlib.optim.shards import Shards, sum_of_squares
from shardlib.tree import Tree


def clip_by_global_norm(max_norm: float) -> GradientTransformation:
    """Multiply all updates by ``min(1, max_norm / norm)``, the norm taken over every element of every leaf.

    The same on every mesh: shards are summed, copies and tied leaves counted once.

    Raises:
        ValueError: ``max_norm`` is not positive.
    """
    if not max_norm > 0:
        raise ValueError(f"clip_by_global_norm({max_norm}): the largest norm allowed must be positive")

    def factor(updates: Tree, scale: torch.Tensor | None, shards: Shards) -> torch.Tensor:
        norm = shards.sum(sum_of_squares, updates).sqrt()
        if scale is not None:
            norm = norm * scale
        return (max_norm / norm.clamp(min=max_norm)).to(torch.float64)

    def update(updates: Tree, state: Tree, params: Tree, *, shards: Shards) -> tuple[Tree, Tree]:
        return scaled(updates, factor(updates, None, shards)), state

    return GradientTransformation(empty_init, update, Locality.GLOBAL, factor=factor)
