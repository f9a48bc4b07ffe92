"""Clipping: by the global norm, by value, by the norm of each parameter."""

from __future__ import annotations

import torch

from shardlib.collectives.summation import sum_of_squares
from shardlib.optim.base import GradientTransformation, empty_init
from shardlib.optim.locality import Locality
from shardlib.optim.ranges import check, is_positive
from shardlib.optim.shards import Shards
from shardlib.tree import Tree, tree_map


def clip_by_global_norm(max_norm: float) -> GradientTransformation:
    """Multiply all updates by ``min(1, max_norm / norm)``, with the norm over all elements of all leaves.

    The norm is the same on every mesh: over all shards, with copies and tied leaves counted once.

    Raises:
        ValueError: ``max_norm`` is not positive.

    >>> p, g = {"w": torch.tensor([3.0, 4.0])}, {"w": torch.tensor([0.6, -0.8])}
    >>> tx = sl.optim.clip_by_global_norm(0.5)
    >>> updates, state = tx.update(g, tx.init(p), p)
    >>> updates["w"]
    tensor([ 0.3000, -0.4000])
    """
    check(
        "clip_by_global_norm",
        "the largest norm allowed is a number above 0",
        max_norm=(max_norm, is_positive(max_norm)),
    )

    def factor(updates: Tree, scale: torch.Tensor | None, shards: Shards) -> torch.Tensor:
        norm = shards.sum(sum_of_squares, updates).sqrt()
        if scale is not None:
            norm = norm * scale
        return (max_norm / norm.clamp(min=max_norm)).to(torch.float64)

    def update(updates: Tree, state: Tree, params: Tree, *, shards: Shards) -> tuple[Tree, Tree]:
        by = factor(updates, None, shards)
        return tree_map(lambda update: update * by.to(update.dtype), updates), state

    return GradientTransformation(empty_init, update, Locality.GLOBAL, factor=factor)


def clip_by_value(max_delta: float) -> GradientTransformation:
    """Clamp every element to ``±max_delta``; as optax.clip and torch.nn.utils.clip_grad_value_.

    Raises:
        ValueError: ``max_delta`` is not positive.

    >>> p, g = {"w": torch.tensor([3.0, 4.0])}, {"w": torch.tensor([0.6, -0.8])}
    >>> tx = sl.optim.clip_by_value(0.7)
    >>> updates, state = tx.update(g, tx.init(p), p)
    >>> updates["w"]
    tensor([ 0.6000, -0.7000])
    """
    check(
        "clip_by_value", "the largest value allowed is a number above 0", max_delta=(max_delta, is_positive(max_delta))
    )

    def update(updates: Tree, state: Tree, params: Tree, *, shards: Shards) -> tuple[Tree, Tree]:
        return tree_map(lambda update: update.clamp(-max_delta, max_delta), updates), state

    return GradientTransformation(empty_init, update, Locality.ELEMENTWISE)


def clip_by_block_norm(max_norm: float) -> GradientTransformation:
    """Multiply each parameter's update by ``min(1, max_norm/norm)``, with the norm of this update.

    optax.clip_by_block_rms(threshold) does the same with the root mean square of the update.

    Raises:
        ValueError: ``max_norm`` is not positive.

    >>> p, g = {"w": torch.tensor([3.0, 4.0])}, {"w": torch.tensor([0.6, -0.8])}
    >>> tx = sl.optim.clip_by_block_norm(0.5)
    >>> updates, state = tx.update(g, tx.init(p), p)
    >>> updates["w"]
    tensor([ 0.3000, -0.4000])
    """
    check(
        "clip_by_block_norm", "the largest norm allowed is a number above 0", max_norm=(max_norm, is_positive(max_norm))
    )

    def update(updates: Tree, state: Tree, params: Tree, *, shards: Shards) -> tuple[Tree, Tree]:
        norms = shards.leaf_sums((sum_of_squares,), updates)[0].sqrt()
        clipped = tree_map(torch.clone, updates)
        for number, (update,) in shards.leaves(clipped):
            update.mul_(max_norm / norms[number].clamp(min=max_norm))
        return clipped, state

    return GradientTransformation(empty_init, update, Locality.LEAF)
