"""What a rank moves between memories in a step, and its bytes."""

from __future__ import annotations

from collections.abc import Iterator

from shardlib.common.dtypes import dtype_name
from shardlib.mesh.memories import MEMORIES
from shardlib.plan.payload import Message
from shardlib.plan.value import PlanValue

DIRECTIONS = ("down", "up")  # from the device, to the device
_OF_FILES = {"read": "before the update", "written": "after the update"}


def transfers(plan: PlanValue) -> Iterator[Message]:
    """Every transfer of one rank in a step; ``plan`` is that rank's part of the plan. The axis is one of `DIRECTIONS`, or
    "read" or "written" of what rests in files."""
    for bucket in plan.trained:
        if bucket.memory.optimizer != bucket.memory.grad:
            form = dtype_name(bucket.reduce_dtype)
            sent = bucket.owned * bucket.reduce_dtype.itemsize
            yield Message("gradients", "down", "when summed", form, sent)
        if bucket.memory.optimizer != bucket.memory.param:
            sent = bucket.owned * bucket.dtype.itemsize
            yield Message("parameters", "up", "after the update", dtype_name(bucket.dtype), sent)
    for needs in plan.needs or ():
        for memory, held in needs.bytes.items():
            if held and MEMORIES[memory].rests:
                for way, when in _OF_FILES.items():
                    yield Message("states", way, when, "whole blocks", held // MEMORIES[memory].slots)


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
