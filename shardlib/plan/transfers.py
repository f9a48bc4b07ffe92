"""What a rank moves between memories in a step, and its bytes."""

from __future__ import annotations

from collections.abc import Iterator

from shardlib.common.disk import whole_blocks
from shardlib.common.dtypes import dtype_name
from shardlib.mesh.memories import MEMORIES
from shardlib.plan.buckets import Bucket
from shardlib.plan.payload import Message
from shardlib.plan.value import PlanValue

DIRECTIONS = ("down", "up")  # from the device, to the device
_OF_FILES = {"read": "before the update", "written": "after the update"}
_BLOCKS = "whole blocks"
WAYS = (*DIRECTIONS, *_OF_FILES)


def transfers(plan: PlanValue) -> Iterator[Message]:
    """Every transfer of one rank in a step; ``plan`` is that rank's part of the plan. The axis is one of `DIRECTIONS`, or
    "read" or "written" of what rests in files."""
    for stage_plan in plan.stage_plans:
        yield from _fetches(stage_plan)
        yield from _inputs(stage_plan)
    for bucket in plan.trained:
        if bucket.memory.optimizer != "device":
            form = dtype_name(bucket.reduce_dtype)
            sent = bucket.owned * bucket.reduce_dtype.itemsize
            when, times = (
                ("each micro-batch", plan.step.microbatches) if plan.lands_each(bucket) else ("when summed", 1)
            )
            yield Message("gradients", "down", when, form, sent, times)
            if MEMORIES[bucket.memory.grad].rests:
                yield Message("gradients", "written", when, _BLOCKS, whole_blocks(sent), times)
                if times > 1:
                    yield Message(
                        "gradients", "read", "each further micro-batch", _BLOCKS, whole_blocks(sent), times - 1
                    )
                yield Message("gradients", "read", _OF_FILES["read"], _BLOCKS, whole_blocks(sent))
        yield from filter(None, stores(bucket))
        for way, sent in files(bucket).items():
            yield Message("parameters", way, _OF_FILES[way], _BLOCKS, sent)
    for needs in plan.needs or ():
        for memory, held in needs.bytes.items():
            if held and MEMORIES[memory].rests:
                for way, when in _OF_FILES.items():
                    yield Message("states", way, when, _BLOCKS, held // MEMORIES[memory].slots)


def _fetches(stage_plan: PlanValue) -> Iterator[Message]:
    """The way up of parameters before their use."""
    seen: set[str] = set()
    microbatches, tiled = stage_plan.stages.schedule.microbatches, stage_plan.tiled
    for unit in stage_plan.gathers:
        for bucket in tiled.buckets_of[unit]:
            if sent := fetched(tiled, bucket, again=unit in seen):
                if MEMORIES[bucket.memory.param].rests:
                    yield Message("parameters", "read", "before each use", _BLOCKS, whole_blocks(sent), microbatches)
                yield Message("parameters", "up", "before each use", dtype_name(bucket.dtype), sent, microbatches)
        seen.add(unit)


def fetched(plan: PlanValue, bucket: Bucket, *, again: bool) -> int:
    """Bytes of a bucket's parameters that come up for a use; ``again``: after the micro-batch's first."""
    routes = plan.routes[bucket.name]
    kept = again and len(routes.again) < len(routes.gather)  # the second shard is on the device
    if bucket.memory.param == "device" or kept:
        return 0
    return bucket.size(bucket.param_level) * bucket.dtype.itemsize


def stores(bucket: Bucket) -> tuple[Message | None, Message | None]:
    """The way of a bucket's new parameters from the optimizer's memory, before what gathers them on the device, and their
    way after it to where they are stored."""
    form, size = dtype_name(bucket.dtype), bucket.dtype.itemsize
    stored = MEMORIES[bucket.memory.param].works
    there = "device" if bucket.owners(bucket.param_level) > 1 else stored  # what is gathered is on the device
    first = last = None
    if MEMORIES[bucket.memory.optimizer].works != there:
        way = "up" if there == "device" else "down"
        first = Message("parameters", way, "after the update", form, bucket.owned * size)
    if there != stored:
        whole = bucket.size(bucket.param_level) * size
        last = Message("parameters", "down", "after the update", form, whole)
    return first, last


def files(bucket: Bucket) -> dict[str, int]:
    """Way -> bytes of parameters that rest in files, in an update: new values, and old ones that no master stands for."""
    if not MEMORIES[bucket.memory.param].rests:
        return {}
    sizes = [part.size(part.param_level) * part.dtype.itemsize for part in bucket.cut]
    return dict.fromkeys(
        ("read", "written") if bucket.master_dtype is None else ("written",), sum(map(whole_blocks, sizes))
    )


def _inputs(stage_plan: PlanValue) -> Iterator[Message]:
    """The ways of blocks' inputs, down in forward and up in backward."""
    (stage,) = stage_plan.local_stages
    trace, times = stage_plan.traces[stage] if stage_plan.traces else None, stage_plan.stages.schedule.microbatches
    for way, sent in (("down", trace.down), ("up", trace.up)) if trace else ():
        if sent:
            yield Message("inputs of blocks", way, "each micro-batch", "as computed", sent, times)


def moved(plan: PlanValue) -> dict[str, int]:
    """Direction -> bytes that one rank moves in a step, without numbers such as the loss; "read" and "written" if the plan
    knows of states in files. With several stages, the maximum over ranks."""
    totals = []
    for view in plan.views:
        total = dict.fromkeys(DIRECTIONS, 0)
        for transfer in transfers(view):
            total[transfer.axis] = total.get(transfer.axis, 0) + transfer.bytes
        totals.append(total)
    ways = dict.fromkeys(way for total in totals for way in total)
    return {way: max(total.get(way, 0) for total in totals) for way in ways}
