"""Stochastic rounding: bf16 states that small updates still move, in the mean.

Rounded to the nearest, an update below 1/256 of a bf16 number is lost, and so is a running mean's (1 − b2)·g². Rounded up
or down at random, with odds by distance, nothing is lost in the mean (Gupta et al., arXiv 1502.02551; Zamirai et al.,
2010.06192). The random bits come from the seed, the tensor's path, the element's index in the whole parameter and the
number of the update: they are the same on every mesh.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import torch

from shardlib.kernels.common.rounding import round_to_bf16
from shardlib.optim.base import GradientTransformation
from shardlib.optim.shards import WHOLE, Shards
from shardlib.optim.wrapping import require_no_axis
from shardlib.rng import Key, bits_at
from shardlib.tree import Tree, leaves_of, path_name, tree_map

_COUNTED = 40  # bits for an element's index; above them lies the number of the update


class RoundedState(NamedTuple):
    """``count``: updates so far (0-d int64); ``inner``: the state of what is rounded, in bf16 where it is like parameters."""

    count: torch.Tensor  # type: ignore[assignment]  # optax's name, though tuples have a method of it
    inner: Tree


def stochastic_rounding(tx: GradientTransformation, seed: int = 0) -> GradientTransformation:
    """``tx`` with its state kept in bf16 and rounded at random; bf16 parameters likewise.

    What it computes is fp32, or wider where parameters are. For bf16 parameters without masters, ``precision("bf16",
    master=False)``: 6 bytes of parameter and Adam's moments in place of 14. During an update the shard's fp32 values exist
    beside them.

    Raises:
        IllegalComposition: an optimizer that reduces gradients itself (1-bit Adam and its kin).

    >>> p, g = {"w": torch.ones(2, dtype=torch.bfloat16)}, {"w": torch.ones(2, dtype=torch.bfloat16)}
    >>> tx = sl.optim.stochastic_rounding(sl.optim.adamw(0.1))
    >>> updates, state = tx.update(g, tx.init(p), p)
    """
    require_no_axis("stochastic_rounding", tx)
    key = Key(seed).fold_in("stochastic rounding")

    def init(params: Tree, shards: Shards = WHOLE) -> RoundedState:
        inner = tx.init(tree_map(_wide, params, params), shards=shards)
        narrow = _map_alike(lambda _, part: tree_map(_narrow, part), params, inner)
        return RoundedState(torch.zeros((), dtype=torch.int64), narrow)

    def update(updates: Tree, state: RoundedState, params: Tree, *, shards: Shards) -> tuple[Tree, RoundedState]:
        if params is None:
            raise ValueError("stochastic_rounding needs the parameters: update(updates, state, params)")

        def rounded(name: str, tree: Tree, like: Tree) -> Tree:
            return _rounded(tree, like, key.fold_in(name), state.count, shards)

        wide = tree_map(_wide, params, params)
        held = _map_alike(lambda _, part: tree_map(_wide, part, params), params, state.inner)
        moved, inner = tx.update(tree_map(_wide, updates, params), held, wide, shards=shards)
        target = rounded("parameters", tree_map(torch.add, wide, moved), params)
        # What takes a bf16 parameter to the rounded one: so near to it that adding it in fp32 gives just that.
        moved = tree_map(lambda p, to, by: to - p if p.dtype == torch.bfloat16 else by, params, target, moved)
        narrow = _map_alike(
            lambda name, part, before: tree_map(
                lambda new, old: new.to(old.dtype), rounded(name, part, before), before
            ),
            params,
            inner,
            state.inner,
        )
        return moved, RoundedState(state.count + 1, narrow)

    if tx.locality is None:
        return GradientTransformation(init, lambda u, s, p: update(u, s, p, shards=WHOLE))
    return GradientTransformation(init, update, tx.locality, sends=tx.sends, last=tx.last)


def _map_alike(fn: Callable[..., Tree], params: Tree, state: Tree, *rest: Tree) -> Tree:
    """``fn(path, part, ...)`` of every part of a state that is a tree like the parameters; the rest stays."""
    structure, shapes = optree.tree_structure(params), [leaf.shape for leaf in leaves_of(params)]

    def alike(node: Tree) -> bool:
        return optree.tree_structure(node) == structure and [leaf.shape for leaf in leaves_of(node)] == shapes

    def place(path: tuple[Any, ...], part: Tree, *others: Tree) -> Tree:
        return fn(path_name(path), part, *others) if alike(part) else part

    return optree.tree_map_with_path(place, state, *rest, is_leaf=alike)


def _rounded(tree: Tree, like: Tree, key: Key, count: torch.Tensor, shards: Shards) -> Tree:
    """A copy whose elements are bf16 numbers wherever ``like`` is bf16."""
    out = tree_map(lambda leaf: leaf.clone(memory_format=torch.contiguous_format), tree)
    infos = shards.about(tree)
    for number, index_map, (part, old) in shards.located(out, like):
        if old.dtype == torch.bfloat16:
            own = key.fold_in(infos[number].path)
            for chunk, chunk_map in index_map.chunks(part):
                bits = bits_at(own, chunk_map.flat(len(chunk), chunk.device) + (count << _COUNTED)) >> 8
                chunk.copy_(round_to_bf16(chunk.float(), bits))
    return out


def _wide(leaf: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """What is bf16 in its parameter's dtype, or fp32 where that has 16 bits."""
    return leaf.to(torch.promote_types(param.dtype, torch.float32)) if leaf.dtype == torch.bfloat16 else leaf


def _narrow(leaf: torch.Tensor) -> torch.Tensor:
    return leaf.bfloat16() if leaf.is_floating_point() else leaf
