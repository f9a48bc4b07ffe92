"""What a rank moves between the device's memory and others in a step, and its bytes."""

from __future__ import annotations

from collections.abc import Iterator

from shardlib.common.dtypes import dtype_name
from shardlib.plan.payload import Message
from shardlib.plan.value import PlanValue

DIRECTIONS = ("down", "up")  # from the device, to the device


def transfers(plan: PlanValue) -> Iterator[Message]:
    """Every transfer of one rank in a step; ``plan`` is that rank's part of the plan. The axis is one of `DIRECTIONS`."""
    for bucket in plan.trained:
        if bucket.memory.optimizer != bucket.memory.grad:
            form = dtype_name(bucket.reduce_dtype)
            sent = bucket.owned * bucket.reduce_dtype.itemsize
            yield Message("gradients", "down", "when summed", form, sent)
        if bucket.memory.optimizer != bucket.memory.param:
            sent = bucket.owned * bucket.dtype.itemsize
            yield Message("parameters", "up", "after the update", dtype_name(bucket.dtype), sent)
    times = plan.stages.schedule.microbatches
    for stage in plan.local_stages if plan.traces else ():
        assert plan.traces is not None
        for way, sent in (("down", plan.traces[stage].down), ("up", plan.traces[stage].up)):
            if sent:
                yield Message("inputs of blocks", way, "each micro-batch", "as computed", sent, times)


def moved(plan: PlanValue) -> dict[str, int]:
    """Direction -> bytes that one rank moves in a step, without numbers such as the loss. With several stages, the maximum
    over ranks."""
    totals = []
    for view in plan.views:
        total = dict.fromkeys(DIRECTIONS, 0)
        for transfer in transfers(view):
            total[transfer.axis] += transfer.bytes
        totals.append(total)
    return {way: max(total[way] for total in totals) for way in DIRECTIONS}
