"""A train state as named pieces: each a range of one flattened leaf (or slice), whatever mesh and stage it came from.

Every rank owns a range of every parameter (the optimizer's layout). Parameters, masters and each of the
optimizer's trees are cut into these ranges under names that do not depend on the mesh, so a state saved on one
mesh is restored on another by copying the ranges that overlap.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import optree
import torch

from shardlib.mesh.mesh import Mesh
from shardlib.mesh.specs import Window
from shardlib.optim.train_state import OptimizerState, TrainState
from shardlib.plan.buckets import Bucket
from shardlib.plan.plan import Plan
from shardlib.tree import path_name

PARAMS, MASTERS = "params/", f"opt/{OptimizerState._fields.index('masters')}/"


class Piece(NamedTuple):
    """Elements ``start`` to ``start + data.numel()`` of a flattened slice of a leaf; ``data`` is a view of the state.

    The slice is ``window``, or the whole leaf.
    """

    name: str
    start: int
    data: torch.Tensor
    window: Window | None = None


def owned_pieces(state: TrainState) -> Iterator[Piece]:
    """What this rank saves: its own ranges, of copies the first rank's alone, and on rank 0 what is not sharded."""
    plan, mesh = state.params.plan, state.params.mesh
    for bucket in plan.buckets:
        if not plan.counts(bucket, mesh.coords) or any(mesh.coords[axis] for axis in plan.copies(bucket)):
            continue
        yield from bucket_pieces(state, bucket)
    if mesh.rank == 0:
        yield from common_pieces(state)


def bucket_pieces(state: TrainState, bucket: Bucket) -> Iterator[Piece]:
    """This rank's own ranges of a bucket: of parameters and of the optimizer's trees."""
    plan, mesh = state.params.plan, state.params.mesh
    index = bucket.owner(mesh.coords, bucket.param_level, bucket.levels)
    mine = bucket.owner_segment(state.params.buffers[bucket.name], bucket.param_level, index)
    yield from _cut(plan, mesh, bucket, PARAMS, mine, bucket.levels)
    for name, part, tensor in _flat_states(state, bucket):
        yield from _cut(plan, mesh, part, name, tensor, part.levels)


def needed_pieces(state: TrainState) -> Iterator[Piece]:
    """Every range this rank holds, as views to be filled."""
    plan, mesh = state.params.plan, state.params.mesh
    for bucket in plan.buckets:
        yield from _cut(plan, mesh, bucket, PARAMS, state.params.buffers[bucket.name], bucket.param_level)
        for name, part, tensor in _flat_states(state, bucket):
            yield from _cut(plan, mesh, part, name, tensor, part.levels)
    yield from common_pieces(state)


def sources_of(name: str, saved: Mapping[str, list[Piece]]) -> list[Piece]:
    """The saved pieces that a piece of that name is filled from.

    A parameter and its master stand for each other, the master first: it has more digits.
    """
    for prefix in (MASTERS, PARAMS):
        if name.startswith(prefix):
            path = name.removeprefix(prefix)
            return saved.get(MASTERS + path) or saved.get(PARAMS + path) or []
    return saved.get(name, [])


def common_pieces(state: TrainState) -> Iterator[Piece]:
    """Tensors that are equal on all ranks: counters of the optimizer, buffers of the model."""
    plan = state.params.plan
    for prefix, tree in (("opt", state.opt), ("buffers", state.buffers)):
        for path, leaf in _leaves(tree):
            if isinstance(leaf, torch.Tensor) and not (prefix == "opt" and plan.numbering.run_named(path[-1])):
                yield Piece(f"{prefix}/{path_name(path)}", 0, leaf.reshape(-1))


def _flat_states(state: TrainState, bucket: Bucket) -> Iterator[tuple[str, Bucket, torch.Tensor]]:
    """The optimizer's flat tensors for one bucket or parts of it, named by the place of the tree they belong to."""
    for path, leaf in _leaves(state.opt):
        name, part = state.params.plan.numbering.run_named(path[-1]) or (None, bucket)
        if name == bucket.name and isinstance(leaf, torch.Tensor):
            yield f"opt/{path_name(path[:-1])}/", part, leaf


def _leaves(tree: Any) -> list[tuple[tuple[Any, ...], Any]]:
    paths, leaves, _ = optree.tree_flatten_with_path(tree)
    return list(zip(paths, leaves, strict=True))


def _cut(plan: Plan, mesh: Mesh, bucket: Bucket, prefix: str, buffer: torch.Tensor, level: int) -> Iterator[Piece]:
    index = bucket.owner(mesh.coords, 0, level)
    cuts = windows(plan, mesh, bucket)
    held = bucket.held(mesh.coords)
    for path, numel, part in zip(bucket.paths, held, bucket.leaf_segments(buffer, level), strict=True):
        start = index * part.numel()
        yield Piece(prefix + path, start, part[: max(0, min(part.numel(), numel - start))], cuts.get(path))


def windows(plan: Plan, mesh: Mesh, bucket: Bucket) -> dict[str, Window]:
    """Path -> window, of the leaves that are slices on this rank."""
    if not bucket.slices:
        return {}
    found = {}
    for placement in plan.placements:
        if placement.path in bucket.paths:
            compute = placement.compute
            found[placement.path] = compute.spec.window(compute.shape, plan.sizes, mesh.coords)
    return found
