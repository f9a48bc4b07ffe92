"""Making a plan: from the claims of transforms to the spec of every tensor, before any rank runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from shardlib.axes import check_axes
from shardlib.claims import LeafInfo, Slots, Transform, resolve
from shardlib.errors import IllegalComposition
from shardlib.layout import Bucket, stands_alone
from shardlib.mesh import Mesh
from shardlib.parts import SequencePlan
from shardlib.plan import ROLES, Placement, Plan
from shardlib.schedules.pipeline import NO_BLOCKS, Pipeline
from shardlib.specs import Leaf, P, check_leaves
from shardlib.tree import Tree, TreeDef, check_tensors, flatten, ties
from shardlib.units import unit_names


def build_plan(params: Tree, mesh: Mesh, transform: Transform, *, optimizer: Any = None) -> Plan:
    """Decide every spec. Pure: reads shapes and dtypes alone, runs on meta tensors, moves no data.

    Args:
        params: a pytree of tensors (or meta tensors).
        optimizer: anything with ``init(params)``; only its state's size is asked for.

    Raises:
        TreeError: a leaf that is not a tensor.
        IllegalComposition: claims that conflict, or that do not fit the mesh.
        SpecError: specs that do not fit the shapes.
    """
    paths, leaves, treedef = flatten(params)
    check_tensors(paths, leaves)
    owner_of = ties(leaves)
    distinct = sorted(set(owner_of))
    infos = [
        LeafInfo(
            paths[index],
            tuple(leaves[index].shape),
            leaves[index].dtype,
            aliases=tuple(paths[i] for i, owner in enumerate(owner_of) if owner == index and i != index),
        )
        for index in distinct
    ]
    slots, owners, log = resolve(transform, mesh.shape, infos)
    check_axes(slots, owners, mesh)
    _check_sync(slots)

    sequence = _sequence(slots, mesh.shape)
    batch_axes = tuple(
        axis
        for axis in mesh.shape
        # What zero sums over the axis of a sequence are gradients of its parts, not of parts of the batch.
        if ("reduce", axis, "method") in slots and not (sequence and axis == sequence.axis)
    )
    split = _splits(slots, mesh.shape)
    microbatches = slots.get(("schedule", "microbatches"), 1)
    sync = slots.get(("schedule", "sync")) or ("each" if split["grad"] else "last")
    if sync == "last" and split["grad"] and microbatches > 1:
        split["grad"] = ()
        log += ("sync='last': gradients are kept whole until the last micro-batch",)
    log += _gathered_outputs(slots, mesh.shape)
    if slots.get(("schedule", "pipeline")) and sync == "each" and microbatches > 1:
        log += (
            f"gradients are reduced after each of {microbatches} micro-batches, into their shards; pipeline(sync='last') "
            f"sends 1/{microbatches} of that and keeps them whole meanwhile",
        )
    units = unit_names(params)
    draft = [_place(info, units[index], slots, split, mesh.shape) for info, index in zip(infos, distinct, strict=True)]
    order = {unit: number for number, unit in enumerate(dict.fromkeys(units))}
    buckets = _buckets(draft, slots, split, batch_axes, sequence, mesh.shape, order)
    bucket_of = {path: bucket.name for bucket in buckets for path in bucket.paths}
    placements = tuple(replace(placement, bucket=bucket_of[placement.path]) for placement in draft)
    check_leaves([placement.compute for placement in placements], mesh.shape)
    pipeline = slots.get(("schedule", "pipeline"))
    place_of = {index: place for place, index in enumerate(distinct)}
    plan = Plan(
        sizes=dict(mesh.shape),
        treedef=treedef,
        leaf_paths=tuple(paths),
        owners=tuple(place_of[owner] for owner in owner_of),
        placements=placements,
        buckets=buckets,
        batch_axes=batch_axes,
        microbatches=microbatches,
        sync=sync,
        remat=slots.get(("schedule", "remat")),
        prefetch=slots.get(("schedule", "prefetch"), True),
        loss_scale=slots.get(("schedule", "loss_scale")),
        cast_batch=slots.get(("schedule", "cast_batch")),
        pipeline=pipeline and _all_blocks(pipeline, treedef),
        sequence=sequence,
        log=log,
    )
    if optimizer is None:
        return plan
    return replace(plan, optimizer_bytes=tuple(_optimizer_bytes(view, optimizer) for view in plan.views))


def _all_blocks(pipeline: Pipeline, treedef: TreeDef) -> Pipeline:
    """With the last blocks in the last stage, if those have no parameters: transforms see leaves alone.

    Raises:
        IllegalComposition: parameters that are not a list of blocks, or are fewer than the blocks that were cut.
    """
    if treedef.type not in (list, tuple):
        told = treedef.type.__name__ if treedef.type else "single tensor"
        raise IllegalComposition(NO_BLOCKS.format(told=f"these parameters are a {told}"))
    *first, (start, stop) = pipeline.spans
    if stop > treedef.num_children:
        raise IllegalComposition(
            f"pipeline: partition= gives {stop} costs for {treedef.num_children} blocks; give one per block"
        )
    return replace(pipeline, spans=(*first, (start, treedef.num_children)))


def _check_sync(slots: Slots) -> None:
    if slots.get(("schedule", "sync")) == "each" and not any(slot[:2] == ("live", "grad") for slot in slots):
        raise IllegalComposition(
            "sync='each' reduces gradients after every micro-batch into their shards, and at ZeRO stages 0 and "
            "1 they are kept whole; use sync='last' (the same numbers, less traffic), or stage 2 or 3"
        )


def _gathered_outputs(slots: Slots, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """A line for the log where a layer's sliced output is made whole on every rank."""
    styles = {slot[1]: style for slot, style in slots.items() if slot[0] == "use" and slot[2] == "style"}
    whole = sorted(p for p, s in styles.items() if s.kind == "column" and s.whole and sizes.get(s.axis, 1) > 1)
    words = sorted(p for p, s in styles.items() if s.kind == "vocab" and sizes.get(s.axis, 1) > 1)
    told = [f"gathered on every rank: the outputs of {', '.join(whole)}"] if whole else []
    if words:
        told.append(f"gathered on every rank: logits by {', '.join(words)}, except in sl.linear_cross_entropy")
    return tuple(told)


def _place(
    info: LeafInfo,
    unit: str,
    slots: Slots,
    split: Mapping[str, tuple[str, ...]],
    sizes: Mapping[str, int],
) -> Placement:
    dtype = slots.get(("use", info.path, "dtype"), info.dtype)
    compute = Leaf(info.path, info.shape, dtype, slots.get(("use", info.path, "spec"), P()))
    trainable = dtype.is_floating_point and slots.get(("use", info.path, "trainable"), True)
    master = slots.get(("use", info.path, "master"))

    def stored(role: str, dtype: torch.dtype) -> Leaf:
        return replace(compute, dtype=dtype, spec=compute.spec.split(split[role], info.shape, sizes))

    return Placement(
        path=info.path,
        aliases=info.aliases,
        unit=unit,
        bucket="",
        compute=compute,
        param=stored("param", dtype),
        grad=stored("grad", _reduce_dtype(dtype, slots)) if trainable else None,
        optimizer=stored("optimizer", master or dtype) if trainable else None,
        style=slots.get(("use", info.path, "style")),
    )


def _reduce_dtype(dtype: torch.dtype, slots: Slots) -> torch.dtype:
    """As asked; else 16-bit gradients are summed in fp32 and wider ones as they are."""
    if dtype.itemsize < 4:
        return slots.get(("reduce", "*", "dtype"), torch.float32)
    return dtype


def _buckets(
    placements: Sequence[Placement],
    slots: Slots,
    split: Mapping[str, tuple[str, ...]],
    batch_axes: tuple[str, ...],
    sequence: SequencePlan | None,
    sizes: Mapping[str, int],
    order: Mapping[str, int],
) -> tuple[Bucket, ...]:
    pipeline = slots.get(("schedule", "pipeline"))
    groups: dict[tuple[Any, ...], list[Placement]] = {}
    for placement in placements:
        trainable = placement.grad is not None
        master = slots.get(("use", placement.path, "master")) if trainable else None
        # A leaf that is not trained has no optimizer state: it is split as its parameters are, and no further.
        axes = split["optimizer"] if trainable else split["param"]
        numel = math.prod(placement.compute.spec.local_shape(placement.compute.shape, sizes))
        alone = placement.path if stands_alone(numel, math.prod(sizes[axis] for axis in axes)) else ""
        slices = tuple(axis for axis in placement.compute.spec.axes if sizes[axis] > 1)
        sums = (placement.style.axis,) if placement.style and placement.style.sums else ()
        stages = slots.get(("use", placement.path, "stages"), ())
        if sequence and trainable and sequence.axis not in (*slices, *sums):
            sums = (*sums, sequence.axis)  # each rank's gradient is that of its own positions
        key = (
            *(order[placement.unit], placement.unit, str(placement.param.dtype), trainable, master, axes, alone),
            *(slices, sums, stages),
        )
        groups.setdefault(key, []).append(placement)
    buckets: list[Bucket] = []
    for key, members in sorted(
        groups.items(), key=lambda item: (item[0][0], item[0][2], not item[0][3], str(item[0][4]), *item[0][6:])
    ):
        _, unit, _, trainable, master, axes, alone, slices, sums, stages = key
        first = members[0]
        name = f"{unit or '(top)'}/{str(first.param.dtype).removeprefix('torch.')}" + ("" if trainable else "/frozen")
        shared = (f"stages {', '.join(map(str, stages))}",) if len(stages) > 1 else ()
        name = alone or "/".join((name, *slices, *(f"sum over {axis}" for axis in sums), *shared))
        buckets.append(
            Bucket(
                name=name if not any(bucket.name == name for bucket in buckets) else f"{name}/master",
                unit=unit,
                paths=tuple(member.path for member in members),
                shapes=tuple(member.compute.spec.local_shape(member.compute.shape, sizes) for member in members),
                dtype=first.param.dtype,
                reduce_dtype=first.grad.dtype if first.grad else first.param.dtype,
                master_dtype=master,
                trainable=trainable,
                axes=axes,
                sizes=tuple(sizes[axis] for axis in axes),
                param_level=len(split["param"]),
                grad_level=len(split["grad"]) if trainable else 0,
                replicas=tuple(axis for axis in (*batch_axes, *sums) if sizes[axis] > 1 and axis not in axes),
                slices=slices,
                stages=stages,
                homes=pipeline.homes(stages) if pipeline else (),
            )
        )
    return tuple(buckets)


def _sequence(slots: Slots, sizes: Mapping[str, int]) -> SequencePlan | None:
    """How sequences are cut, where they are; None on an axis of size one."""
    found: SequencePlan | None = slots.get(("schedule", "sequence"))
    if found is None:
        return None
    axis, kind = found.axis, found.kind
    sliced = any(axis in spec.axes for slot, spec in slots.items() if slot[0] == "use" and slot[2] == "spec")
    if kind == "megatron" and not sliced:
        raise IllegalComposition(
            f"sequence(axis={axis!r}, kind={kind!r}) changes the exchanges of layers that are sliced over {axis!r}, and none "
            f"is: add tensor_slicing(rules, axis={axis!r}), or use kind='ulysses' or 'ring', which need none"
        )
    return found if sizes[axis] > 1 else None


def _splits(slots: Slots, sizes: Mapping[str, int]) -> dict[str, tuple[str, ...]]:
    """Axes each role is split over, ordered so that each role's are the first few of the next one's."""
    found: dict[str, tuple[str, ...]] = {}
    before: tuple[str, ...] = ()
    for role in ROLES:
        mine = {slot[2] for slot in slots if slot[:2] == ("live", role)}
        missing = sorted(set(before) - mine)
        if missing:
            raise IllegalComposition(
                f"the {role} state is not split over axis {', '.join(map(repr, missing))}, and the one before it (param, "
                "grad, optimizer) is; a higher ZeRO stage splits everything a lower one does"
            )
        before = (*before, *(axis for axis in sizes if axis in mine and axis not in before))
        found[role] = before
    return {role: tuple(axis for axis in axes if sizes[axis] > 1) for role, axes in found.items()}


def _optimizer_bytes(plan: Plan, optimizer: Any) -> int:
    """Bytes of per-parameter optimizer state, asked of ``optimizer.init`` on fake shards; scalars are left out."""
    with FakeTensorMode():
        shards = {
            bucket.name: torch.empty(bucket.owned, dtype=bucket.master_dtype or bucket.dtype) for bucket in plan.trained
        }
        _, leaves, _ = flatten(optimizer.init(shards))
        state = sum(
            leaf.numel() * leaf.dtype.itemsize for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()
        )
    masters = sum(bucket.owned * bucket.master_dtype.itemsize for bucket in plan.trained if bucket.master_dtype)
    return state + masters
