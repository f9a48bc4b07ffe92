"""Making a plan: from the claims of transforms to the spec of every tensor, before any rank runs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from shardlib.collectives.sequence.base import SequenceKind
from shardlib.errors import IllegalComposition, axes_named
from shardlib.mesh.mesh import Mesh
from shardlib.mesh.specs import Leaf, P, check_leaves
from shardlib.plan.buckets import Bucket, stands_alone
from shardlib.plan.check_axes import check_axes
from shardlib.plan.claims import LeafInfo, Slots, Transform, resolve
from shardlib.plan.placement import OwnedAxis, Placement, check_dtypes
from shardlib.plan.plan import ROLES, Plan
from shardlib.plan.units import unit_names
from shardlib.schedules.pipeline import NO_BLOCKS, Pipeline
from shardlib.tree import Tree, TreeDef, check_tensors, flatten, leaves_of, ties


def build_plan(params: Tree, mesh: Mesh, transform: Transform, *, optimizer: Any = None) -> Plan:
    """Decide every spec. Pure: reads shapes and dtypes alone, runs on meta tensors, moves no data.

    Args:
        params: a pytree of tensors (or meta tensors).
        optimizer: a gradient transformation; it is asked for the size of its state, and for what it sends.

    Raises:
        TreeError: a leaf that is not a tensor, or of a dtype that is neither trained nor held alone.
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
    log += _padded(slots, infos, mesh.shape)
    if slots.get(("schedule", "pipeline")) and sync == "each" and microbatches > 1:
        log += (
            f"gradients are reduced after each of {microbatches} micro-batches, into their shards; pipeline(sync='last') "
            f"sends 1/{microbatches} of that and keeps them whole meanwhile",
        )
    units = unit_names(params)
    draft = [_place(info, units[index], slots, split, mesh.shape) for info, index in zip(infos, distinct, strict=True)]
    check_dtypes(draft, slots)
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
        codecs=_by_axis(slots, "codec", mesh.shape),
        packings=_by_axis(slots, "gathered", mesh.shape),
        second_level=_second_level(slots, split["param"], mesh.shape),
        log=log,
    )
    _check_compression(plan, slots)
    if optimizer is None:
        return plan
    plan = own_axis(plan, optimizer)
    states, sent = zip(*(optimizer.planned(view) for view in plan.views), strict=True)
    spent = tuple(_optimizer_bytes(view, state) for view, state in zip(plan.views, states, strict=True))
    return replace(plan, optimizer_bytes=spent, optimizer_payload=sent)


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
    """Lines for the log where what a layer shares out is made whole on every rank."""
    found: dict[str, list[str]] = {}
    for slot, style in slots.items():
        if slot[0] == "use" and slot[2] == "style" and style.gathered and sizes.get(style.axis, 1) > 1:
            found.setdefault(style.gathered, []).append(slot[1])
    texts = [text.format(paths=", ".join(sorted(paths))) for text, paths in sorted(found.items())]
    return tuple(f"gathered on every rank: {text}" for text in texts)


def _padded(slots: Slots, infos: Sequence[LeafInfo], sizes: Mapping[str, int]) -> tuple[str, ...]:
    """A line for the log where slices are padded with rows of zeros."""
    found = []
    for info in infos:
        spec = slots.get(("use", info.path, "spec"), P())
        if spec.padded:
            rows = spec.local_shape(info.shape, sizes)[0]
            ways = math.prod(sizes[axis] for axis in spec.entries[0])
            found.append(f"{info.path} ({info.shape[0]} as {ways} × {rows})")
    return (f"padded with rows of zeros: {', '.join(found)}",) if found else ()


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
    sequence: SequenceKind | None,
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
                short=_short(members, slices, sizes),
                stages=stages,
                homes=pipeline.homes(stages) if pipeline else (),
            )
        )
    return tuple(buckets)


def _short(
    members: Sequence[Placement], slices: tuple[str, ...], sizes: Mapping[str, int]
) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
    """See `shardlib.plan.buckets.Bucket.short`."""
    computes = [member.compute for member in members]
    if not any(leaf.spec.padded for leaf in computes):
        return ()
    found = []
    for place in itertools.product(*(range(sizes[axis]) for axis in slices)):
        coords = dict.fromkeys(sizes, 0) | dict(zip(slices, place, strict=True))
        held = tuple(leaf.spec.window(leaf.shape, sizes, coords).numel for leaf in computes)
        if held != tuple(leaf.spec.local_numel(leaf.shape, sizes) for leaf in computes):
            found.append((place, held))
    return tuple(found)


def _sequence(slots: Slots, sizes: Mapping[str, int]) -> SequenceKind | None:
    """How sequences are cut, where they are; None on an axis of size one."""
    found: SequenceKind | None = slots.get(("schedule", "sequence"))
    if found is None:
        return None
    specs = [spec for slot, spec in slots.items() if slot[0] == "use" and slot[2] == "spec"]
    found.check({axis for spec in specs for axis in spec.axes})
    return found if sizes[found.axis] > 1 else None


def _splits(slots: Slots, sizes: Mapping[str, int]) -> dict[str, tuple[str, ...]]:
    """Axes each role is split over, ordered so that each role's are the first few of the next one's."""
    found: dict[str, tuple[str, ...]] = {}
    before: tuple[str, ...] = ()
    for role in ROLES:
        mine = {slot[2] for slot in slots if slot[:2] == ("live", role)}
        missing = sorted(set(before) - mine)
        if missing:
            raise IllegalComposition(
                f"the {role} state is not split over {axes_named(missing)}, and the one before it (param, "
                "grad, optimizer) is; a higher ZeRO stage splits everything a lower one does"
            )
        # What the second shard is split over comes first: it is the stage before the last of a gather.
        new = [axis for axis in sizes if axis in mine and axis not in before]
        before = (*before, *sorted(new, key=lambda axis: ("live", "second", axis) not in slots))
        found[role] = before
    return {role: tuple(axis for axis in axes if sizes[axis] > 1) for role, axes in found.items()}


def _by_axis(slots: Slots, name: str, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Axis -> what was said of its exchanges, of axes with several ranks."""
    return {
        slot[1]: value
        for slot, value in slots.items()
        if slot[0] == "reduce" and slot[2] == name and sizes[slot[1]] > 1
    }


def _second_level(slots: Slots, split: Sequence[str], sizes: Mapping[str, int]) -> int | None:
    kept = [axis for axis in split if ("live", "second", axis) in slots]
    return len(kept) if 0 < len(kept) < len(split) else None


def _check_compression(plan: Plan, slots: Slots) -> None:
    """Whether there is something to compress on every axis where it is asked for, and whether it can be."""
    asked = {slot[1:]: value for slot, value in slots.items() if slot[0] == "reduce"}
    split = {slot[2]: None for slot in slots if slot[0] == "live" and slot[1] in ROLES}
    for (axis, name), value in asked.items():
        if name == "codec" and value.whole and split:
            raise IllegalComposition(
                f"gradients are to travel over axis {axis!r} in {value}, which are made of whole leaves, and zero splits the "
                f"state over {axes_named(split)}: use zero(stage=0), or sl.onebit() or sl.quantize() to "
                "compress shards"
            )
        if name == "codec" and (axis, "method") not in asked:
            raise IllegalComposition(
                f"gradients are to travel over axis {axis!r} in {value}, and nothing sums them there: add "
                f"zero(axis={axis!r}), or name the axis that it shares the batch over"
            )
        if name == "gathered" and ("live", "param", axis) not in slots:
            raise IllegalComposition(
                f"parameters are to travel over axis {axis!r} in {value}, and none are split over it: add zero(stage=3, "
                f"axis={axis!r}); at lower stages they are not gathered to be used"
            )
    for slot in slots:
        if slot[:2] == ("live", "second") and ("live", "param", slot[2]) not in slots:
            raise IllegalComposition(
                f"a second shard is to be kept over axis {slot[2]!r}, and no parameters are split over it: add zero(stage=3, "
                f"axis={slot[2]!r}) beside the zero(stage=3) of the axis between nodes"
            )
    second, stored = ({slot[2] for slot in slots if slot[:2] == ("live", role)} for role in ("second", "param"))
    if second and second == stored:
        raise IllegalComposition(
            f"a second shard is to be kept over {axes_named(sorted(second))}, and parameters are split over "
            "no other: it would be what is stored. Add zero(stage=3) over the axis between nodes, or drop hierarchical"
        )
    wide = [placement.path for placement in plan.placements if placement.param.dtype == torch.float64]
    narrow = [value for (_, name), value in asked.items() if name in ("codec", "gathered") and not value.wide]
    if wide and narrow:
        raise IllegalComposition(
            f"{narrow[0]} holds no float64, which {len(wide)} parameters are ({wide[0]} first); use float32 parameters, or "
            "sl.onebit() for gradients"
        )


def own_axis(plan: Plan, optimizer: Any) -> Plan:
    """The plan of a step whose optimizer may sum gradients over an axis itself.

    Raises:
        IllegalComposition: it cannot: gradients are split over the axis, or already travel in few bits.
    """
    owned = getattr(optimizer, "owns", None)
    if owned is None:
        return plan
    axis = owned.axis
    if axis not in plan.sizes:
        unsplit = [one for one in plan.batch_axes if not any(one in bucket.axes for bucket in plan.trained)]
        remedy = f"name {unsplit[0]!r} with axis=" if unsplit else f"add {axis}=1 to the mesh"
        raise IllegalComposition(
            f"{owned.name} sums gradients over axis {axis!r}, which the mesh ({', '.join(plan.sizes)}) does not have; "
            f"{remedy}"
        )
    split = any(axis in bucket.axes for bucket in plan.trained)
    if split or (plan.sizes[axis] > 1 and axis not in plan.batch_axes):
        does = "zero splits the state over it" if split else "the batch is not shared over it"
        raise IllegalComposition(
            f"{owned.name} sums gradients over axis {axis!r} itself, and {does}. Split over another axis of the mesh, and "
            f"replicate over this one: zero(stage, axis='local', replicate={axis!r})"
        )
    if axis in plan.codecs:
        raise IllegalComposition(
            f"{owned.name} sums gradients over axis {axis!r} in few bits itself, and they already travel there in "
            f"{plan.codecs[axis]}; drop one of the two"
        )
    log = (
        *plan.log,
        f"{owned.name} sums gradients over axis {axis!r} itself, at steps that it chooses: {owned.codec}",
    )
    whole = plan.whole and own_axis(plan.whole, optimizer)
    return replace(plan, owned=OwnedAxis(axis, owned.codec, owned.name), whole=whole, log=log)


def _optimizer_bytes(plan: Plan, state: Tree) -> int:
    """Bytes of masters and of an optimizer's (fake) state, but for its counters (0-d)."""
    kept = sum(leaf.numel() * leaf.dtype.itemsize for leaf in leaves_of(state) if leaf.dim())
    masters = sum(bucket.owned * bucket.master_dtype.itemsize for bucket in plan.trained if bucket.master_dtype)
    return kept + masters
