"""Norms and products over all elements of a tree, or of each leaf, counted once over the ranks of a mesh."""

from __future__ import annotations

import math
from typing import Any

import torch

from shardlib.collectives.buffers import AxisLink, summed
from shardlib.collectives.summation import SumOf, sum_of_squares
from shardlib.common._compat import transformed
from shardlib.errors import TreeError
from shardlib.optim.checks import is_real
from shardlib.optim.shards import WHOLE, MeshShards, Shards
from shardlib.optim.storing import optimizer_shards
from shardlib.plan.buckets import Bucket
from shardlib.sharded.tree import Sharded, require_no_shards
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

    Both are plain, or both `Sharded` by one plan: parameters, gradients, or one of each. Where `torch.func` is around, it is
    differentiated like any function, and both are parameters or both gradients: see docs/functional.md.

    Raises:
        TreeError: trees of other leaves, or sharded otherwise; one of each inside of torch.func.

    >>> sl.optim.vdot({"w": torch.tensor([3.0, 4.0])}, {"w": torch.tensor([1.0, 2.0])})
    tensor(11., dtype=torch.float64)
    """
    plans = [tree.plan.layout if isinstance(tree, Sharded) else None for tree in (one, other)]
    if plans[0] != plans[1]:
        raise TreeError("vdot: these trees are sharded by different plans, or one is plain; give both in one layout")
    if transformed():
        return _product_of_values(one, other)
    (first, second), shards = _flat("vdot", one, other)
    check_alike("vdot", first, second, ("first tree", "second tree"))
    return shards.leaf_sums((_product,), first, second).sum()


def _product_of_values(one: Tree, other: Tree) -> torch.Tensor:
    """`vdot` as a function that is differentiated."""
    if not isinstance(one, Sharded) or not isinstance(other, Sharded):
        pairs = zip(flatten(trained_part(one))[1], flatten(trained_part(other))[1], strict=True)
        return torch.stack([(x.double() * y.double()).sum() for x, y in pairs]).sum()
    if one.role != other.role:
        raise TreeError(
            f"vdot of a tree of role {one.role!r} and one of role {other.role!r} inside of torch.func: give both in one "
            "layout. A gradient in that of parameters is "
            "torch.func.grad(lambda p: sl.value_and_grad(loss_fn)(p, batch)[0])(params)"
        )
    plan, mesh = one.plan, one.mesh
    parts: dict[tuple[str, ...], torch.Tensor] = {}
    for bucket in plan.trained:
        level = one.level(bucket)
        axes = tuple(axis for axis in (*bucket.axes[:level], *bucket.slices) if mesh.shape[axis] > 1)
        a, b = (_elements(tree, bucket, level) for tree in (one, other))
        part = torch.stack([(x.double() * y.double()).sum() for x, y in zip(a, b, strict=True)]).sum()
        parts[axes] = parts[axes] + part if axes in parts else part
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for axes, part in parts.items():
        part = part.reshape(1)
        for axis in axes:
            part = summed(part, AxisLink(mesh, axis, "a product of trees"))
        total = total + part.reshape(())
    return total


def _elements(tree: Sharded, bucket: Bucket, level: int) -> list[torch.Tensor]:
    """This rank's elements of a bucket, without padding."""
    buffer, extents = tree.buffers[bucket.name], bucket.extents(tree.mesh.coords, level)
    segments = bucket.leaf_segments(buffer, level)
    if all(len(extent) == len(segment) for extent, segment in zip(extents, segments, strict=True)):
        return [buffer]
    return [segment[: len(extent)] for extent, segment in zip(extents, segments, strict=True)]


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
