"""Clipping: by the global norm, by value, by the norm of each parameter, by norms of parameters' own rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from shardlib.collectives.summation import sum_of_squares
from shardlib.mesh.specs import IndexMap
from shardlib.optim.base import GradientTransformation, empty_init, require_params
from shardlib.optim.checks import check, is_positive
from shardlib.optim.code import coded
from shardlib.optim.norms import is_order, norm_of
from shardlib.optim.shards import Locality, Shards, device_of
from shardlib.tree import Tree, tree_map


@coded
def clip_by_global_norm(max_norm: float, norm_type: float = 2.0) -> GradientTransformation:
    """Multiply all updates by ``min(1, max_norm / norm)``, with the norm over all elements of all leaves.

    The norm is the same on every mesh: over all shards, with copies and tied leaves counted once.

    Args:
        norm_type: p of the p-norm, or ``math.inf`` for the largest magnitude, as in `torch.nn.utils.clip_grad_norm_`.

    Raises:
        ValueError: ``max_norm`` is not positive, or ``norm_type`` not above 0.

    >>> p, g = {"w": torch.tensor([3.0, 4.0])}, {"w": torch.tensor([0.6, -0.8])}
    >>> tx = sl.optim.clip_by_global_norm(0.5)
    >>> updates, state = tx.update(g, tx.init(p), p)
    >>> updates["w"]
    tensor([ 0.3000, -0.4000])
    """
    check(
        "clip_by_global_norm",
        "the largest norm allowed is a number above 0, and so is norm_type, or math.inf",
        max_norm=(max_norm, is_positive(max_norm)),
        norm_type=(norm_type, is_order(norm_type)),
    )

    def factor(updates: Tree, scale: torch.Tensor | None, shards: Shards) -> torch.Tensor:
        norm = norm_of(updates, norm_type, shards)
        if scale is not None:
            norm = norm * scale
        return (max_norm / norm.clamp(min=max_norm)).to(torch.float64)

    def update(updates: Tree, state: Tree, params: Tree, *, shards: Shards) -> tuple[Tree, Tree]:
        by = factor(updates, None, shards)
        return tree_map(lambda update: update * by.to(update.dtype), updates), state

    return GradientTransformation(empty_init, update, Locality.GLOBAL, factor=factor)


@coded
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


@coded
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


@coded
def adaptive_grad_clip(clipping: float, eps: float = 1e-3) -> GradientTransformation:
    """Clip each row of an update by the same row of the parameter: by ``min(1, clipping · max(‖w‖, eps) / ‖u‖)``.

    Adaptive gradient clipping (Brock et al., arXiv 2102.06171, section 4.1). A row is a unit of a layer in torch's layout:
    what belongs to one index of dimension 0. A parameter of one dimension, or none, is one row.

    Raises:
        ValueError: ``clipping`` or ``eps`` is not positive.

    >>> p, g = {"w": torch.tensor([[3.0, 4.0], [0.0, 1.0]])}, {"w": torch.tensor([[0.6, -0.8], [0.0, 0.05]])}
    >>> tx = sl.optim.adaptive_grad_clip(0.1)
    >>> updates, state = tx.update(g, tx.init(p), p)
    >>> updates["w"]
    tensor([[ 0.3000, -0.4000],
            [ 0.0000,  0.0500]])
    """
    check(
        "adaptive_grad_clip",
        "clipping and eps are numbers above 0",
        clipping=(clipping, is_positive(clipping)),
        eps=(eps, is_positive(eps)),
    )

    def update(updates: Tree, state: Tree, params: Tree, *, shards: Shards) -> tuple[Tree, Tree]:
        require_params("adaptive_grad_clip", params)
        clipped = tree_map(lambda leaf: leaf.clone(memory_format=torch.contiguous_format), updates)
        params = tree_map(torch.Tensor.contiguous, params)
        counts = [_rows(info.shape) for info in shards.about(params)]
        shape = (sum(counts), 2, shards.summation.width)
        sums = torch.zeros(shape, dtype=torch.float64, device=device_of(updates))
        of_leaf: Sequence[torch.Tensor] = sums.split(counts)
        for number, index_map, pair in shards.shares(params, clipped):
            for tree, leaf in enumerate(pair):
                for chunk, chunk_map in index_map.chunks(leaf):
                    rows = _grid(chunk.double().square(), chunk_map)
                    first = _first(chunk_map)
                    of_leaf[number][first : first + len(rows), tree] += shards.summation.along(rows, 1)
        of_params, of_updates = shards.total(sums).sqrt().unbind(1)
        limits = clipping * of_params.clamp(min=eps)
        factors = (limits / torch.maximum(of_updates, limits)).split(counts)
        for number, index_map, (leaf,) in shards.located(clipped):
            for chunk, chunk_map in index_map.chunks(leaf):
                grid = _grid(chunk, chunk_map)
                first, skip = _first(chunk_map), chunk_map.box(len(chunk)).skip if len(chunk_map.shape) > 1 else 0
                by = factors[number][first : first + len(grid), None].expand(grid.shape).reshape(-1)
                chunk.mul_(by[skip : skip + len(chunk)])
        return clipped, state

    def sends(shards: Shards) -> Mapping[str, int]:
        return shards.total_sends(2 * sum(_rows(info.shape) for info in shards.about({})))

    return GradientTransformation(empty_init, update, Locality.LEAF, sends=sends)


def _rows(shape: tuple[int, ...]) -> int:
    """The number of rows that are clipped by themselves."""
    return shape[0] if len(shape) > 1 else 1


def _first(index_map: IndexMap) -> int:
    """The row of the first element."""
    return index_map.box(0).first[0] if len(index_map.shape) > 1 else 0


def _grid(values: torch.Tensor, index_map: IndexMap) -> torch.Tensor:
    """``values``, at the first elements of ``index_map``, as rows [rows, elements of a row], with zeros beside them."""
    if len(index_map.shape) < 2:
        return values.view(1, -1)
    box = index_map.box(len(values))
    grid = values.new_zeros(math.prod(box.shape))
    grid[box.skip : box.skip + len(values)] = values
    return grid.view(box.shape[0], -1)
