"""Bytes that one rank holds under a plan: of the training state, and at the peak of a step in addition to it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from shardlib.common.disk import whole_blocks
from shardlib.mesh.memories import MEMORIES, window
from shardlib.plan.value import ROLES, PlanValue
from shardlib.schedules import peak_of_stages


def held_bytes(plan: PlanValue, role: str, memory: str | None = None) -> int:
    """Bytes one rank holds of "param", "grad", "optimizer", "comm" or "buffers", padding included, or of all ("total").

    In one ``memory`` (see `shardlib.mesh.memories`), or by default in all. "grad" is the buffer in which gradients are
    accumulated: whole gradients where they are reduced once at the end, and several where they are summed in a tree. Where
    gradients go to another memory for the update, it is their memory there, and on the device what is held until they go:
    the accumulated gradients of several micro-batches, or at most two units of one. With several stages, the maximum over
    ranks.
    """
    if len(plan.views) > 1:
        return max(held_bytes(view, role, memory) for view in plan.views)
    if role == "param":
        return _within(memory, _parameters(plan))
    if role == "grad":
        return _within(memory, _gradients(plan))
    if role == "optimizer":
        if plan.needs is None:
            raise ValueError("the plan was made without an optimizer; pass optimizer= to make_plan")
        return max(_within(memory, needs.bytes.items()) for needs in plan.needs)
    if role == "comm":
        return _within(memory, (("device", channel.bytes) for channel in plan.channels))
    if role == "buffers":
        return _within(memory, (("device", numel * dtype.itemsize) for dtype, numel in plan.buffers))
    if role == "total":
        known = ROLES if plan.needs is not None else ROLES[:2]
        return sum(held_bytes(plan, summand, memory) for summand in (*known, "comm", "buffers"))
    raise ValueError(f"role {role!r} is not one of {', '.join(ROLES)}, comm, buffers, total")


def _within(memory: str | None, held: Iterable[tuple[str, int]]) -> int:
    return sum(count for where, count in held if memory in (None, where))


def _parameters(plan: PlanValue) -> Iterator[tuple[str, int]]:
    """Memories with the bytes of parameters that a rank holds there."""
    for bucket in plan.buckets:
        for part in bucket.cut:
            size = part.size(part.param_level) * part.dtype.itemsize
            yield bucket.memory.param, MEMORIES[bucket.memory.param].held(size)
    if sizes := resting_sizes(plan):  # all parameters are in one memory
        yield MEMORIES[plan.buckets[0].memory.param].works, window(list(sizes.values()))


def resting_sizes(plan: PlanValue) -> dict[str, int]:
    """Unit -> bytes of host memory that its parameters take while they pass through, for units on disk."""
    sizes: dict[str, int] = {}
    for bucket in plan.buckets:
        if MEMORIES[bucket.memory.param].rests:
            held = sum(whole_blocks(part.size(part.param_level) * part.dtype.itemsize) for part in bucket.cut)
            sizes[bucket.unit] = sizes.get(bucket.unit, 0) + held
    return sizes


def _gradients(plan: PlanValue) -> Iterator[tuple[str, int]]:
    """Memories with the bytes of gradients that a rank holds there."""
    leaving = 0
    for bucket in plan.trained:
        size = bucket.reduce_dtype.itemsize
        accumulated = bucket.size(bucket.grad_level) * size * plan.step.partial_sums
        if bucket.memory.optimizer == "device":
            yield "device", accumulated
            continue
        yield MEMORIES[bucket.memory.optimizer].works, bucket.owned * size
        if plan.step.microbatches > 1 and not plan.lands_each(bucket):
            yield "device", accumulated
        else:
            leaving += bucket.owned * size
    widest = max((bucket.reduce_dtype.itemsize for bucket in plan.trained), default=0)
    yield "device", min(leaving, 2 * plan.largest_unit * widest)


def live_bytes(plan: PlanValue) -> int | None:
    """Peak bytes that a rank holds in addition to `held_bytes` during a micro-batch; None when the plan was not traced.

    Counts the outputs of operations: activations and their gradients, temporary tensors, gathered parameters, gradients
    before they are split. Measured on the first micro-batch. Leaves out workspace inside an operation, the optimizer's
    temporary tensors, and gradients that wait for the network. With several stages an upper bound for the rank that holds
    most: what all micro-batches in flight keep, plus what one needs in addition while it computes.
    """
    if plan.traces is None:
        return None
    if len(plan.views) > 1:
        return max(live_bytes(view) or 0 for view in plan.views)
    in_flight, traces = peak_of_stages(plan.stages.schedule), plan.traces
    kept = sum(in_flight[stage] * traces[stage].kept for stage in plan.local_stages)
    return kept + max(traces[stage].live - traces[stage].kept for stage in plan.local_stages)


def peak_bytes(plan: PlanValue) -> int | None:
    """Peak bytes of the device's memory that a rank holds in a step, its batch left out; None when the plan was not traced.

    `held_bytes` and `live_bytes` together; or less, in a step of one micro-batch in one stage, where gradients come into
    being while activations go.
    """
    live = live_bytes(plan)
    if live is None or plan.traces is None:
        return None
    total = held_bytes(plan, "total", "device")
    leave = any(bucket.memory.optimizer != bucket.memory.grad for bucket in plan.trained)
    if plan.stages.axes or plan.step.microbatches > 1 or leave:
        return total + live
    return total - held_bytes(plan, "grad", "device") + plan.traces[0].peak


def kept_on_host(plan: PlanValue) -> int:
    """Bytes of pinned host memory in which a rank keeps inputs of blocks; 0 when the plan was not traced.

    With several stages, the maximum over ranks.
    """
    if len(plan.views) > 1:
        return max(kept_on_host(view) for view in plan.views)
    in_flight = peak_of_stages(plan.stages.schedule)
    return sum(in_flight[stage] * plan.traces[stage].host for stage in plan.local_stages) if plan.traces else 0
