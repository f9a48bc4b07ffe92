"""Stochastic rounding, by which small updates change bf16 states in the mean.

Under rounding to the nearest, an update below 1/256 of a bf16 number is lost, and so is the term (1 − b2)·g² of a running
mean. Under rounding up or down at random, with probabilities by distance, the mean is exact (Gupta et al., arXiv 1502.02551;
Zamirai et al., arXiv 2010.06192). The random bits depend on the seed, the tensor's path, the element's index in the whole
parameter and the number of the update, so they are the same on every mesh.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import torch

from shardlib.kernels.common.saved import round_to_bf16
from shardlib.optim.base import GradientTransformation, require_params
from shardlib.optim.code import coded
from shardlib.optim.combine import require_no_axis
from shardlib.optim.shards import WHOLE, Shards
from shardlib.rng import Key, bits_at
from shardlib.tree import Tree, leaves_of, path_name, tree_map

_COUNTED = 40  # bits of an element's index in a counter; the bits above are the number of the update


class RoundedState(NamedTuple):
    """``count``: updates so far (0-d int64); ``inner``: the inner state, whose trees that are like the parameters are
    bf16."""

    count: torch.Tensor  # type: ignore[assignment]  # optax's name, though tuples have a method of it
    inner: Tree


@coded
def stochastic_rounding(tx: GradientTransformation, seed: int = 0) -> GradientTransformation:
    """``tx`` with its state stored in bf16 by stochastic rounding; updates of bf16 parameters are rounded the same way.

    It computes in fp32, or wider for wider parameters. It is for bf16 parameters without masters, ``precision("bf16",
    master=False)``: parameter and Adam's moments then take 6 bytes instead of 14. During an update the fp32 values of the
    shard exist too.

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
        narrow = _map_alike(lambda _, tree: tree_map(_narrow, tree), params, inner)
        return RoundedState(torch.zeros((), dtype=torch.int64), narrow)

    def update(updates: Tree, state: RoundedState, params: Tree, *, shards: Shards) -> tuple[Tree, RoundedState]:
        require_params("stochastic_rounding", params)

        def rounded(name: str, tree: Tree, like: Tree) -> Tree:
            return _rounded(tree, like, key.fold_in(name), state.count, shards)

        wide = tree_map(_wide, params, params)
        held = _map_alike(lambda _, tree: tree_map(_wide, tree, params), params, state.inner)
        moved, inner = tx.update(tree_map(_wide, updates, params), held, wide, shards=shards)
        target = rounded("parameters", tree_map(torch.add, wide, moved), params)
        # The difference of two bf16 numbers this close is exact in fp32, so adding it gives exactly the rounded parameter.
        moved = tree_map(lambda p, to, by: to - p if p.dtype == torch.bfloat16 else by, params, target, moved)
        narrow = _map_alike(
            lambda name, tree, before: tree_map(
                lambda new, old: new.to(old.dtype), rounded(name, tree, before), before
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
    """``state`` with ``fn(path, tree, ...)`` in place of every subtree that is like the parameters; the rest stays."""
    structure, shapes = optree.tree_structure(params), [leaf.shape for leaf in leaves_of(params)]

    def alike(node: Tree) -> bool:
        return optree.tree_structure(node) == structure and [leaf.shape for leaf in leaves_of(node)] == shapes

    def mapped(path: tuple[Any, ...], node: Tree, *others: Tree) -> Tree:
        return fn(path_name(path), node, *others) if alike(node) else node

    return optree.tree_map_with_path(mapped, state, *rest, is_leaf=alike)


def _rounded(tree: Tree, like: Tree, key: Key, count: torch.Tensor, shards: Shards) -> Tree:
    """A copy of ``tree``, with elements rounded to bf16 numbers (in their own dtype) where ``like`` is bf16."""
    out = tree_map(lambda leaf: leaf.clone(memory_format=torch.contiguous_format), tree)
    infos = shards.about(tree)
    for number, index_map, (leaf, old) in shards.located(out, like):
        if old.dtype == torch.bfloat16:
            leaf_key = key.fold_in(infos[number].path)
            for chunk, chunk_map in index_map.chunks(leaf):
                bits = bits_at(leaf_key, chunk_map.flat(len(chunk), chunk.device) + (count << _COUNTED)) >> 8
                chunk.copy_(round_to_bf16(chunk.float(), bits))
    return out


def _wide(leaf: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """A bf16 ``leaf`` in its parameter's dtype, at least fp32; other leaves unchanged."""
    return leaf.to(torch.promote_types(param.dtype, torch.float32)) if leaf.dtype == torch.bfloat16 else leaf


def _narrow(leaf: torch.Tensor) -> torch.Tensor:
    """A floating-point ``leaf`` in bf16; other leaves unchanged."""
    return leaf.bfloat16() if leaf.is_floating_point() else leaf
