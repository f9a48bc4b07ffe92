"""Making a plan: from the claims of transforms to the spec of every tensor, before any rank runs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import optree

from shardlib.collectives.summation import IN_FLOAT64
from shardlib.collectives.tree_sum import most_nodes
from shardlib.common.disk import whole_blocks
from shardlib.mesh.memories import MEMORIES, taken, window
from shardlib.mesh.mesh import Mesh
from shardlib.mesh.specs import check_leaves
from shardlib.plan.bucketing import buckets_of, check_tiles, idle_tiles, units_of
from shardlib.plan.buckets import Bucket
from shardlib.plan.claims import LeafInfo
from shardlib.plan.conditions import check_axes
from shardlib.plan.exchanges import Reductions
from shardlib.plan.placement import (
    RoleAxes,
    check_dtypes,
    check_parameters,
    in_bucket,
    padded_slices,
    placed,
    second_level,
    splits_of,
)
from shardlib.plan.plan import Plan
from shardlib.plan.records import OptimizerNeeds, Shape, StepPlan
from shardlib.plan.stages import Stages
from shardlib.plan.transform import Resolved, Transform, joined, members_of, resolve
from shardlib.plan.value import PlanValue
from shardlib.tree import Tree, check_tensors, flatten, ties


def build_plan(params: Tree, mesh: Mesh, transform: Transform, *, optimizer: Any = None) -> Plan:
    """Decide every spec. Pure: reads shapes and dtypes only, runs on meta tensors, moves no data.

    Args:
        params: a pytree of tensors (or meta tensors).
        optimizer: a gradient transformation, whose state and messages are counted.

    Raises:
        TreeError: a leaf that is not a tensor, or a leaf to be trained whose dtype cannot be trained.
        IllegalComposition: claims that conflict, or that do not fit the mesh.
        SpecError: specs that do not fit the shapes.
    """
    paths, leaves, treedef = flatten(params)
    check_tensors(paths, leaves)
    owner_of = ties(leaves)
    aliases: dict[int, list[str]] = {}
    for index, owner in enumerate(owner_of):
        aliases.setdefault(owner, []).extend([paths[index]] * (owner != index))
    infos = [
        LeafInfo(paths[index], tuple(leaves[index].shape), leaves[index].dtype, tuple(also))
        for index, also in aliases.items()
    ]
    resolved = resolve(transform, mesh.shape, infos)
    check_axes(resolved, mesh, members_of(transform))
    for member in members_of(transform):
        member.check(resolved)
    # Along the sequence's axis zero sums gradients of sequence parts; the ranks share one batch.
    sequence = resolved.step.sequence
    shared = sequence.axis if sequence and mesh.shape[sequence.axis] > 1 else None
    batch_axes = tuple(axis for axis in mesh.shape if resolved.varies_over(axis) and axis != shared)
    splits, step, notes = _step(resolved, splits_of(resolved), batch_axes)
    stages = (resolved.step.stages or Stages.one(step.microbatches)).over_blocks(treedef)
    notes += [*_gathered_outputs(resolved), *padded_slices(resolved), *idle_tiles(resolved, splits.param)]
    resolved = resolved.noting(notes)
    units = units_of(params, zip(aliases, infos, strict=True), resolved)
    draft = [placed(info, units[index], resolved, splits) for info, index in zip(infos, aliases, strict=True)]
    check_dtypes(draft, resolved)
    check_parameters({paths[owner]: leaves[owner] for owner in aliases}, resolved)
    numbers = {unit: number for number, unit in enumerate(dict.fromkeys(units))}
    buckets = buckets_of(draft, resolved, splits, batch_axes, stages, numbers)
    bucket_of = {path: bucket for bucket in buckets for path in bucket.paths}
    placements = tuple(in_bucket(placement, bucket_of[placement.path]) for placement in draft)
    check_leaves([placement.compute for placement in placements], mesh.shape)
    placement_of = {leaf: position for position, leaf in enumerate(aliases)}
    plan = Plan(
        sizes=dict(mesh.shape),
        shape=Shape(treedef, tuple(paths), tuple(placement_of[owner] for owner in owner_of)),
        placements=placements,
        buckets=buckets,
        batch_axes=batch_axes,
        step=step,
        stages=stages,
        reductions=Reductions(
            resolved.of_axes("codec"),
            resolved.of_axes("gathered"),
            second_level(resolved, splits),
            summation=resolved.everywhere("summation") or IN_FLOAT64,
        ),
        claims=resolved,
    )
    check_tiles(plan)
    return plan if optimizer is None else with_needs(with_owner(plan, optimizer), optimizer)


def _step(resolved: Resolved, splits: RoleAxes, batch_axes: Sequence[str]) -> tuple[RoleAxes, StepPlan, list[str]]:
    """The splits, changed where the schedule keeps gradients whole; the schedule of the step; and notes for the log."""
    asked = resolved.step
    ranks = math.prod(resolved.sizes[axis] for axis in batch_axes)
    total = asked.total_microbatches
    microbatches = asked.microbatches or (total or ranks) // ranks
    tree = total is not None
    sync = asked.sync or ("each" if splits.grad and not tree else "last")
    notes = []
    if sync == "last" and splits.grad and microbatches > 1:
        splits = replace(splits, grad=())
        why = "summed in a tree" if tree else "sync='last'"
        notes.append(f"{why}: gradients are kept whole until the last micro-batch")
    if asked.stages and sync == "each" and microbatches > 1:
        notes.append(
            f"gradients are reduced after each of {microbatches} micro-batches, into their shards; pipeline(sync='last') "
            f"sends 1/{microbatches} of that, and keeps gradients whole until the last micro-batch"
        )
    if total is not None:
        notes += _several_nodes(total, {axis: resolved.sizes[axis] for axis in batch_axes})
    sequence = asked.sequence if asked.sequence and resolved.sizes[asked.sequence.axis] > 1 else None
    if asked.tokens and not asked.tokens.padded:
        ranks_of_experts = math.prod(resolved.sizes[axis] for axis in asked.tokens.axes)
        notes.append(
            f"tokens travel {asked.tokens}: counted as if every expert got as many, and at most {ranks_of_experts} times a "
            "rank's own rows, there and back, where one rank's experts get all"
        )
        if asked.tokens.spare:
            notes.append(
                "weights of second copies: counted as if every spare slot had a copy, of an expert in the ranks' other half"
            )
    prefetch, remat = asked.prefetch is not False, asked.remat
    if remat is not None:
        sliced = {use.style.axis for use in resolved.uses.values() if use.style}
        remat, more = remat.over(sliced, resolved.sizes, sequence)
        notes += more
    tiles = {use.tokens.module: use.tokens.tiles for use in resolved.uses.values() if use.tokens}
    decided = StepPlan(
        microbatches,
        sync,
        remat,
        prefetch,
        asked.loss_scale,
        asked.cast_batch,
        sequence,
        total,
        tiles,
        asked.update or "exact",
        asked.tokens,
        asked.layer_drop,
        asked.token_drop,
        asked.autocast,
        asked.keep,
    )
    return splits, decided, notes


def _several_nodes(total: int, ranks: Mapping[str, int]) -> Iterator[str]:
    """Lines for the log on axes over which a rank sends several sums of a gradient."""
    share = total // math.prod(ranks.values())
    for axis, size in reversed(tuple(ranks.items())):  # neighbours in the batch are summed first
        if size > 1 and (nodes := most_nodes(total, share)) > 1:
            yield (
                f"summed in a tree: {share} of {total} micro-batches are up to {nodes} nodes of it, so over axis {axis!r} a "
                f"rank sends {nodes} sums of each gradient"
            )
        share *= size


def _gathered_outputs(resolved: Resolved) -> list[str]:
    """Lines for the log on sliced layers whose outputs are gathered on every rank."""
    gathered: dict[str, list[str]] = {}
    for path, use in resolved.uses.items():
        if use.style and use.style.gathered and resolved.sizes.get(use.style.axis, 1) > 1:
            gathered.setdefault(use.style.gathered, []).append(path)
    texts = [text.format(paths=", ".join(sorted(paths))) for text, paths in sorted(gathered.items())]
    return [f"gathered on every rank: {text}" for text in texts]


def with_owner(plan: Plan, optimizer: Any) -> Plan:
    """The plan with the optimizer's claim to sum gradients over an axis itself; the same plan if the optimizer has none.

    Raises:
        IllegalComposition: gradients are split over that axis, or already compressed on it.
    """
    owner = getattr(optimizer, "owns", None)
    if owner is None or plan.claims is None:
        return plan
    claims = joined(plan.claims, owner)
    reductions = replace(plan.reductions, owner=claims.reductions[owner.axis].owner)
    part = plan.part and replace(plan.part, whole=with_owner(plan.everywhere, optimizer))
    return replace(plan, reductions=reductions, claims=claims, part=part)


def with_needs(plan: Plan, optimizer: Any) -> Plan:
    """The plan with the bytes and messages of an optimizer."""
    needs = []
    for view in plan.views:
        state, payload = optimizer.planned(view)
        staged = _staged_bytes(view, optimizer.in_turn(view))
        needs.append(OptimizerNeeds(*_optimizer_bytes(view, state), staged, payload))
    return replace(plan, needs=tuple(needs))


def _staged_bytes(plan: PlanValue, in_turn: bool) -> int:
    """Bytes of the slots for new parameters, which groups of buckets take in turns from step to step.

    Args:
        in_turn: whether buckets are updated one after the other.
    """

    def staged(bucket: Bucket) -> int:
        here, there = (MEMORIES[memory] for memory in (bucket.memory.optimizer, bucket.memory.param))
        crosses = here.works != "device" and (there.rests or here.works != there.works)
        passes = crosses and bucket.master_dtype is not None and (bucket.master_dtype != bucket.dtype or here.rests)
        return taken(bucket.owned, bucket.dtype) if passes else 0

    elsewhere = [bucket for bucket in plan.trained if bucket.memory.optimizer != "device"]
    if plan.step.ahead or not elsewhere:
        return 0  # updates that run ahead have memory of their own
    if not in_turn:
        return sum(map(staged, plan.trained))
    others = [bucket for bucket in plan.trained if bucket.memory.optimizer == "device"]
    apart = [bucket for bucket in others if MEMORIES[bucket.memory.param].rests]
    before = len(apart) or min(len(others), 1)  # groups on the device
    groups = [*[0] * before, *map(staged, reversed(elsewhere))]
    if len(groups) % 2 and len(groups) > 1:  # the next step begins with the other slot
        return 2 * max(groups)
    return sum(max(turn, default=0) for turn in (groups[::2], groups[1::2]))


def _optimizer_bytes(plan: PlanValue, state: Tree) -> tuple[dict[str, int], dict[str, int]]:
    """Memory -> bytes that master weights and an optimizer's (fake) state take, without its counters (0-d); and memory ->
    their own bytes."""
    held, states = dict.fromkeys(MEMORIES, 0), dict.fromkeys(MEMORIES, 0)
    passing: dict[str, dict[str, int]] = {}  # memory that buffers are brought to -> bucket -> bytes

    def add(bucket: Bucket | None, memory: str, size: int) -> None:
        kind = MEMORIES[memory]
        states[memory] += size
        beside = plan.step.ahead and memory != "device"  # old values are beside new ones
        held[memory] += kind.held(size) * (2 if beside else 1)
        if kind.rests and bucket is not None:
            groups = passing.setdefault(kind.works, {})
            groups[bucket.name] = groups.get(bucket.name, 0) + whole_blocks(size)

    def by_path(path: Sequence[object]) -> str:
        """The memory of what a state has by parameter instead of by bucket: where its bucket is worked on."""
        names = filter(None, map(plan.numbering.bucket_with, reversed(path)))
        bucket = next((plan.bucket_of[name] for name in names), plan.trained[0])
        return MEMORIES[bucket.memory.optimizer].works

    paths, leaves, _ = optree.tree_flatten_with_path(state)
    for path, leaf in zip(paths, leaves, strict=True):
        run = plan.numbering.run_along(path)
        bucket = plan.bucket_of[run[0]] if run else None
        if leaf.dim():
            add(bucket, bucket.memory.optimizer if bucket else by_path(path), leaf.numel() * leaf.dtype.itemsize)
    for bucket in plan.trained:
        if bucket.master_dtype is not None:
            add(bucket, bucket.memory.optimizer, bucket.owned * bucket.master_dtype.itemsize)
        if plan.step.ahead and bucket.memory.optimizer != "device":
            waiting = bucket.dtype.itemsize if bucket.master_dtype != bucket.dtype else 0  # new parameters
            waiting += (
                bucket.reduce_dtype.itemsize if plan.step.update == "delay" else 0
            )  # gradients of the step before
            held[bucket.memory.optimizer] += bucket.owned * waiting
    for memory, groups in passing.items():
        held[memory] += window(list(groups.values()))
    return held, states
