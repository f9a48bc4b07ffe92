"""Norms and products over all elements of a tree, or of each leaf, counted once over the ranks of a mesh."""

from __future__ import annotations

import math
from typing import Any

import torch

from shardlib.collectives.summation import SumOf, sum_of_squares
from shardlib.errors import TreeError
from shardlib.optim.ranges import is_real
from shardlib.optim.shards import WHOLE, MeshShards, Shards
from shardlib.optim.storing import optimizer_shards
from shardlib.sharded.marks import require_no_shards
from shardlib.sharded.tree import Sharded
from shardlib.tree import Tree, check_alike, flatten, ties, trained_part, unflatten


def global_norm(tree: Tree, ord: float = 2.0) -> torch.Tensor:
    """The norm over all elements of all leaves, float64, 0-d: as `optax.global_norm`, and the same on every mesh.

    Copies on several ranks, padding and tied leaves are counted once. Of `Sharded` parameters the trained leaves count, and
    of their gradients all. Collective: every rank calls it, outside of a loss. With it a step of sharpness-aware
    minimisation (SAM, arXiv 2010.01412) is::

        loss, grads = grad_fn(params, batch)
        by = rho / sl.optim.global_norm(grads)
        ahead = sl.optim.apply_updates(params, tree_map(lambda g: g * by, grads))
        loss, grads = grad_fn(ahead, batch)

    Args:
        tree: `Sharded` parameters or gradients, or a plain pytree.
        ord: p of the p-norm, or ``math.inf`` for the largest magnitude.

    Raises:
        ValueError: ``ord`` is not above 0.
        TreeError: a part of a sharded tree.

    >>> sl.optim.global_norm({"w": torch.tensor([3.0, 4.0])}), sl.optim.global_norm({"w": torch.tensor([3.0, -4.0])}, 1)
    (tensor(5., dtype=torch.float64), tensor(7., dtype=torch.float64))
    """
    _require_order("global_norm", ord)
    (flat,), shards = _flat("global_norm", tree)
    return norm_of(flat, ord, shards)


def leaf_norms(tree: Tree, ord: float = 2.0) -> dict[str, torch.Tensor]:
    """Path -> `global_norm` of each leaf by itself. A tied leaf has one entry, its first path.

    >>> sl.optim.leaf_norms({"a": torch.tensor([3.0, 4.0]), "b": torch.ones(1)})
    {'a': tensor(5., dtype=torch.float64), 'b': tensor(1., dtype=torch.float64)}
    """
    _require_order("leaf_norms", ord)
    (flat,), shards = _flat("leaf_norms", tree)
    paths = [info.path for info in shards.about(flat)]
    if math.isinf(ord):
        norms = shards.leaf_max(_largest, flat).clamp(min=0)
    else:
        norms = _root(shards.leaf_sums((_powers(ord),), flat)[0], ord)
    return dict(zip(paths, norms, strict=True))


def vdot(one: Tree, other: Tree) -> torch.Tensor:
    """Σ one·other over all elements of all leaves, float64, 0-d, counted as in `global_norm`.

    Both are plain, or both `Sharded` by one plan: parameters, gradients, or one of each.

    Raises:
        TreeError: trees of other leaves, or sharded otherwise.

    >>> sl.optim.vdot({"w": torch.tensor([3.0, 4.0])}, {"w": torch.tensor([1.0, 2.0])})
    tensor(11., dtype=torch.float64)
    """
    plans = [tree.plan.layout if isinstance(tree, Sharded) else None for tree in (one, other)]
    if plans[0] != plans[1]:
        raise TreeError("vdot: these trees are sharded by different plans, or one is plain; give both in one layout")
    (first, second), shards = _flat("vdot", one, other)
    check_alike("vdot", first, second, ("first tree", "second tree"))
    return shards.leaf_sums((_product,), first, second).sum()


def norm_of(flat: Tree, ord: float, shards: Shards) -> torch.Tensor:
    """The norm of a tree whose elements ``shards`` counts."""
    if math.isinf(ord):
        return shards.max(_largest, flat).clamp(min=0)
    return _root(shards.sum(_powers(ord), flat), ord)


def is_order(value: Any) -> bool:
    """Whether ``value`` is the p of a norm."""
    return is_real(value) and value > 0


def _require_order(what: str, ord: Any) -> None:
    if not is_order(ord):
        raise ValueError(f"{what}(ord={ord!r}): the order of a norm is a number above 0, or math.inf")


def _flat(what: str, *trees: Tree) -> tuple[list[Tree], Shards]:
    """The elements that this rank holds of what counts in each tree, and what sums over those of all ranks."""
    given = trees[0]
    if isinstance(given, Sharded):
        flat = [tree.buffers if tree.role == "grad" else optimizer_shards(tree) for tree in trees]
        return flat, MeshShards(given.plan, given.mesh)
    require_no_shards(what, trees)
    parts = [flatten(trained_part(tree)) for tree in trees]
    repeated = {at for _, leaves, _ in parts for at, owner in enumerate(ties(leaves)) if owner != at}
    once = [[None if at in repeated else leaf for at, leaf in enumerate(leaves)] for _, leaves, _ in parts]
    return [unflatten(treedef, leaves) for (_, _, treedef), leaves in zip(parts, once)], WHOLE


def _largest(x: torch.Tensor) -> torch.Tensor:
    return x.abs().max().double()


def _powers(ord: float) -> SumOf:
    return sum_of_squares if ord == 2 else SumOf(lambda x: x.double().abs().pow(ord))


def _root(total: torch.Tensor, ord: float) -> torch.Tensor:
    return total.sqrt() if ord == 2 else total.pow(1 / ord)


_product = SumOf(lambda x, y: x.double() * y.double())
