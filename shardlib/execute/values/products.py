"""The product of two sharded trees, over all ranks."""

from __future__ import annotations

import torch

from shardlib.collectives.buffers import Link, summed
from shardlib.errors import TreeError
from shardlib.plan.buckets import Bucket
from shardlib.sharded.given import require_sharded
from shardlib.sharded.tree import Sharded


def vdot(one: Sharded, other: Sharded) -> torch.Tensor:
    """The sum over all ranks of the products of the elements of two sharded trees, 0-d; of trained leaves.

    Differentiable, also where torch.func is around: see docs/functional.md. Collective.

    Args:
        one, other: both parameters, or both in the layout of gradients.

    Raises:
        TreeError: trees of different plans or layouts.

    >>> params = sl.shard({"w": torch.ones(4)}, sl.make_mesh(), stage=3)
    >>> loss, grads = sl.value_and_grad(lambda p, x: (p["w"] * x).sum())(params, torch.arange(4.0))
    >>> sl.vdot(grads, grads)
    tensor(14.)
    """
    require_sharded("vdot", one, other)
    if one.role != other.role or one.plan != other.plan:
        raise TreeError(
            f"vdot of a tree of role {one.role!r} and one of role {other.role!r}: both must be of one plan and one layout. "
            "Make one from the other by optree.tree_map; a gradient in the layout of parameters is "
            "torch.func.grad(lambda p: sl.value_and_grad(loss_fn)(p, batch)[0])(params)"
        )
    plan, mesh = one.plan, one.mesh
    parts: dict[tuple[str, ...], torch.Tensor] = {}
    for bucket in plan.trained:
        level = one.level(bucket)
        axes = tuple(axis for axis in (*bucket.axes[:level], *bucket.slices) if mesh.shape[axis] > 1)
        a, b = (_elements(tree, bucket, level) for tree in (one, other))
        part = torch.stack([(x * y).sum() for x, y in zip(a, b, strict=True)]).sum()
        parts[axes] = parts[axes] + part if axes in parts else part
    total = torch.zeros((), device=mesh.device)
    for axes, part in parts.items():
        part = part.reshape(1)
        for axis in axes:
            part = summed(part, Link(mesh, axis, "a product of trees"))
        total = total + part.reshape(())
    return total


def _elements(tree: Sharded, bucket: Bucket, level: int) -> list[torch.Tensor]:
    """This rank's elements of a bucket, without padding."""
    buffer, extents = tree.buffers[bucket.name], bucket.extents(tree.mesh.coords, level)
    segments = bucket.leaf_segments(buffer, level)
    if all(len(extent) == len(segment) for extent, segment in zip(extents, segments, strict=True)):
        return [buffer]
    return [segment[: len(extent)] for extent, segment in zip(extents, segments, strict=True)]
