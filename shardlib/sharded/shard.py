"""Splits a pytree by a plan, so that each rank keeps its shard of every leaf."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from shardlib.collectives import primitives
from shardlib.errors import TreeError, listing
from shardlib.init.deferred import Deferred, defer
from shardlib.init.draws import Draw
from shardlib.mesh.mesh import Mesh
from shardlib.mesh.specs import IndexMap, P, shard_of
from shardlib.plan.buckets import Bucket
from shardlib.plan.build import build_plan
from shardlib.plan.claims import ROLES
from shardlib.plan.plan import Plan
from shardlib.plan.transform import Transform
from shardlib.sharded.checksum import checksum
from shardlib.sharded.params_on_disk import Filling, ParamsOnDisk, params_rest
from shardlib.sharded.tree import Sharded, check_same_tree, check_ties, require_no_shards
from shardlib.sharded.unshard import Resharded
from shardlib.tree import Tree, check_tensors, flatten, unflatten

Source = Deferred | Resharded  # of leaves' values


def shard_by(
    params: Tree | Callable[[], Tree] | Resharded, mesh: Mesh, transform: Transform, *, filled_later: bool = False
) -> Sharded:
    """This rank's shards of ``params``, or of what the function ``params`` makes, under the plan of ``transform``.

    Args:
        filled_later: whether leaves may be on the meta device. Their shards are zeros, which the caller fills.
    """
    source = params if isinstance(params, Resharded) else defer(params) if callable(params) else None
    tree = source.tree if source else params
    require_no_shards("shard", tree)
    plan = build_plan(tree, mesh, transform)
    if plan.step.remat:
        plan.step.remat.require_decided()
    _check_ranks_agree(plan, mesh)
    if not filled_later and not isinstance(source, Resharded):
        _check_values(tree, mesh)
    return _placed(plan.at(mesh.coords), mesh, tree, source, to_disk=params_rest(plan))


def outline(what: str, params: Any) -> Tree:
    """The whole leaves that ``what`` makes a plan for, with or without values: of `Sharded` parameters, a function that makes
    them, or a pytree."""
    if isinstance(params, Sharded):
        return Resharded(params).tree
    if callable(params):
        return defer(params).tree
    require_no_shards(what, params)
    return params


def shard_alike(params: Tree, plan: Plan, mesh: Mesh) -> Sharded:
    """Shard a whole pytree, with the same values on every rank, under this rank's part of a plan.

    Raises:
        TreeError: leaves that are missing, new or of another shape; lists them.
        RankMismatch: the ranks' values differ.
    """
    paths, leaves, _ = flatten(params)
    check_tensors(paths, leaves)
    check_same_tree(plan.everywhere, paths, [tuple(leaf.shape) for leaf in leaves], whole=True)
    check_ties(plan, dict(zip(paths, leaves, strict=True)))
    _check_values(params, mesh)
    return _placed(plan, mesh, params)


def put_together(params: Tree, like: Sharded) -> Sharded:
    """`shard_alike` of a pytree in which leaves may also be shards, as those of ``like`` are, or made of these.

    Shapes tell: where no leaf has the shape of a shard alone, all are whole.
    """
    plan = like.plan
    paths, leaves, treedef = flatten(params)
    check_tensors(paths, leaves)
    planned = dict(zip(plan.shape.paths, plan.leaves, strict=True))
    held = {path: leaf for path, leaf in planned.items() if leaf.bucket in plan.bucket_of}
    whole = {path: leaf.compute.shape for path, leaf in held.items()}
    local = {path: plan.local_shape(leaf, "param") for path, leaf in held.items()}
    shapes = {path: tuple(leaf.shape) for path, leaf in zip(paths, leaves, strict=True)}
    if not any(local.get(path) == shape != whole[path] for path, shape in shapes.items() if path in whole):
        return shard_alike(params, plan, like.mesh)
    cut = [
        shard_like(like, planned[path].path, leaf) if whole.get(path) == shapes[path] != local[path] else leaf
        for path, leaf in zip(paths, leaves, strict=True)
    ]
    return Sharded(plan, like.mesh, "param", tree=unflatten(treedef, cut))


def shard_like(params: Sharded, path: str, whole: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a whole tensor in the place of the leaf ``path``, in the shape that the leaf has in the tree."""
    plan, mesh = params.plan, params.mesh
    placement = plan.placement_of[path]
    bucket, shape = plan.bucket_of[placement.bucket], plan.local_shape(placement, "param")
    flat = whole.new_zeros(math.prod(shape))
    _fill(flat, shard_of(whole, placement.compute.spec, mesh.shape, mesh.coords), mesh, bucket)
    return flat.view(shape)


def _placed(plan: Plan, mesh: Mesh, tree: Tree, source: Source | None = None, *, to_disk: bool = False) -> Sharded:
    """This rank's shards of the values in ``tree``, or of the values that ``source`` makes; zeros where there are none."""
    held = _BuffersToDisk(plan, mesh) if to_disk else _Buffers(plan, mesh)
    bucket_of = {path: bucket for bucket in plan.buckets for path in bucket.paths}
    paths, leaves, _ = flatten(tree)
    compute = {placement.path: placement.compute.spec for placement in plan.placements}
    sums: dict[str, str] = {}

    def take(path: str, value: torch.Tensor | Draw) -> None:
        hollow = isinstance(value, torch.Tensor) and value.is_meta
        if mesh.size > 1 and path in compute and not hollow:
            sums[path] = str(value) if isinstance(value, Draw) else checksum(value)
        if path in bucket_of:
            bucket, flat = bucket_of[path], held.shard(path, bucket_of[path])
            if isinstance(value, Draw):
                _draw(flat, value, compute[path], mesh, bucket)
            elif not hollow:
                _fill(flat, shard_of(value, compute[path], mesh.shape, mesh.coords), mesh, bucket)
            held.filled(path, bucket)

    if source:
        source.replay(dict(enumerate(paths)), take)
    else:
        for path, leaf in zip(paths, leaves, strict=True):
            take(path, leaf.detach())
    primitives.require_equal(
        mesh,
        "initial values",
        sums,
        "Start every rank from the same seed or checkpoint before sl.shard.",
    )
    return Sharded(plan, mesh, "param", held.finish())


class _Buffers:
    """A rank's buffers while their leaves are filled in; they stay in memory."""

    def __init__(self, plan: Plan, mesh: Mesh) -> None:
        self._buffers = {
            bucket.name: mesh.zeros(bucket.size(bucket.param_level), bucket.dtype, bucket.memory.param)
            for bucket in plan.buckets
        }
        self._shards = {
            path: flat for bucket in plan.buckets for path, flat in _shards(bucket, self._buffers[bucket.name])
        }

    def shard(self, path: str, bucket: Bucket) -> torch.Tensor:
        """The flat memory of a leaf's shard, of zeros."""
        return self._shards[path]

    def filled(self, path: str, bucket: Bucket) -> None:
        """Note that a leaf's shard is there."""

    def finish(self) -> Mapping[str, torch.Tensor]:
        """Bucket name -> buffer, once all leaves are there."""
        return self._buffers


class _BuffersToDisk(_Buffers):
    """Buffers that go to disk as soon as their last leaf is there: in memory are those of which some leaves are."""

    def __init__(self, plan: Plan, mesh: Mesh) -> None:
        self._mesh, self._filling = mesh, Filling(ParamsOnDisk(plan, mesh))
        self._open: dict[str, tuple[torch.Tensor, dict[str, torch.Tensor]]] = {}  # buffers, and shards that are missing

    def shard(self, path: str, bucket: Bucket) -> torch.Tensor:
        if bucket.name not in self._open:
            where = self._mesh.device_for(bucket.memory.param)
            buffer = torch.zeros(bucket.size(bucket.param_level), dtype=bucket.dtype, device=where)
            self._open[bucket.name] = buffer, dict(_shards(bucket, buffer))
        return self._open[bucket.name][1][path]

    def filled(self, path: str, bucket: Bucket) -> None:
        buffer, missing = self._open[bucket.name]
        del missing[path]
        if not missing:
            del self._open[bucket.name]
            self._filling.put(bucket.name, buffer)

    def finish(self) -> Mapping[str, torch.Tensor]:
        return self._filling.finish()


def _shards(bucket: Bucket, buffer: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Path and flat shard of each leaf of a bucket, as views of its buffer."""
    yield from zip(bucket.paths, bucket.leaf_segments(buffer, bucket.param_level), strict=True)


def at_rest(params: Sharded, files: ParamsOnDisk | None = None) -> Sharded:
    """``params``; if their plan has them on disk and they are not there, written to ``files``, or to new ones. Collective."""
    there = params.on_disk
    if not params_rest(params.plan) or (there is not None and files in (None, there.files)):
        return params
    filling = Filling(files or ParamsOnDisk(params.plan, params.mesh))
    for bucket in params.buckets:
        filling.put(bucket.name, params.buffers[bucket.name])
    return Sharded(params.plan, params.mesh, "param", filling.finish())


def _fill(out: torch.Tensor, value: torch.Tensor, mesh: Mesh, bucket: Bucket) -> None:
    """Copy this rank's shard of the slice ``value`` of a leaf to ``out``, flat; padding stays zero."""
    start = bucket.owner(mesh.coords, 0, bucket.param_level) * out.numel()
    shard = value.reshape(-1)[start : start + out.numel()]
    out[: shard.numel()].copy_(shard)


def _draw(out: torch.Tensor, draw: Draw, spec: P, mesh: Mesh, bucket: Bucket) -> None:
    """Draw this rank's shard of a leaf, and no more of the leaf, to ``out``, flat; padding stays zero."""
    first = bucket.owner(mesh.coords, 0, bucket.param_level) * out.numel()
    window = spec.window(draw.shape, mesh.shape, mesh.coords)
    held = min(out.numel(), max(0, window.numel - first))
    draw.fill(out[:held], IndexMap(window, first))


def _check_values(tree: Tree, mesh: Mesh) -> None:
    """Refuse leaves on the meta device, which have no values, unless the mesh is on the meta device too."""
    paths, leaves, _ = flatten(tree)
    hollow = [
        f"{path}: shape {tuple(leaf.shape)}"
        for path, leaf in zip(paths, leaves, strict=True)
        if leaf.device.type == "meta" != mesh.device.type
    ]
    if hollow:
        raise TreeError(
            f"{len(hollow)} parameters on the meta device have no values for {mesh.device}:\n{listing(hollow)}\nPass "
            "sl.shard the function that makes them (params of sl.from_module)."
        )


def _check_ranks_agree(plan: Plan, mesh: Mesh) -> None:
    items: dict[str, Any] = {
        "micro-batches": plan.step.microbatches,
        "transforms": plan.claims and plan.claims.log,
        "batch axes": plan.batch_axes,
    }
    schedule = plan.stages.schedule
    items["schedule"] = f"{schedule.name}, checksum {zlib.crc32(str(schedule).encode()):08x}"
    items["blocks of stages"] = plan.stages.spans
    for placement in plan.placements:
        items[placement.path] = (placement.compute.shape, str(placement.compute.dtype), placement.aliases)
        specs = {role: leaf and leaf.spec for role in ("compute", *ROLES) for leaf in (getattr(placement, role),)}
        items[f"{placement.path} specs"] = f"{specs}, style {placement.style!r}"
    primitives.require_equal(mesh, "parameter trees or plans", items, "Build the same model and plan on every rank.")


def require_same_copies(params: Sharded) -> None:
    """Refuse parameters whose copies differ between ranks. Every rank must call it.

    Raises:
        RankMismatch: copies differ; names the buckets and the ranks.
    """
    mesh = params.mesh
    sums: dict[str, str] = {}
    for bucket in params.buckets:
        split = {*bucket.axes[: params.level(bucket)], *bucket.slices}
        coords = [f"{axis}={mesh.coords[axis]}" for axis in mesh.shape if axis in split]
        sums[" ".join([bucket.name, *coords])] = checksum(params.buffers[bucket.name])
    remedy = "Compute the same values on every rank: from the same seed, file or collective."
    primitives.require_equal(mesh, "parameters", sums, remedy, absent=True)
