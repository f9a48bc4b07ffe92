"""Bytes that one rank holds under a plan: of the training state, and at the peak of a step in addition to it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from shardlib.common.disk import whole_blocks
from shardlib.mesh.memories import MEMORIES, scratch_window, window
from shardlib.plan.buckets import Bucket
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
        return _within(memory, (("device", numel * dtype.itemsize) for dtype, numel, _ in plan.buffers))
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
        if MEMORIES[bucket.memory.grad].rests:
            yield bucket.memory.grad, whole_blocks(bucket.owned * size)
        else:
            yield MEMORIES[bucket.memory.optimizer].works, bucket.owned * size
        if plan.step.microbatches > 1 and not plan.lands_each(bucket):
            yield "device", accumulated
        else:
            leaving += bucket.owned * size
    widest = max((bucket.reduce_dtype.itemsize for bucket in plan.trained), default=0)
    yield "device", min(leaving, plan.most_in_flight * widest)
    yield MEMORIES["disk"].works, resting_gradients(plan)


def resting_gradients(plan: PlanValue) -> int:
    """Bytes of host memory that gradients on disk pass through. They are scratch, which takes one slot of whole blocks."""
    sizes: dict[str, int] = {}
    largest = 0
    for bucket in plan.trained:
        if MEMORIES[bucket.memory.grad].rests:
            held = whole_blocks(bucket.owned * bucket.reduce_dtype.itemsize)
            sizes[bucket.unit] = sizes.get(bucket.unit, 0) + held
            largest = max(largest, held)
    return scratch_window(list(sizes.values()), largest)


def live_bytes(plan: PlanValue) -> int | None:
    """Peak bytes that a rank holds in addition to `held_bytes` during a micro-batch; None when the plan was not traced.

    Counts the outputs of operations: activations and their gradients, temporary tensors, gathered parameters, gradients
    before they are split. Measured on the first micro-batch, with links and a network that take as long as they may. Leaves
    out workspace inside an operation. With several stages an upper bound for the rank that holds most: what all micro-batches
    in flight keep, plus what one needs in addition while it computes.
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

    That of the micro-batches, or of the update if it is higher; temporary tensors of the optimizer are left out. In one stage
    micro-batches are as traced, with gradients that come into being while activations go, and leave for another memory. With
    several stages, and in a tree of sums, at most `held_bytes` and `live_bytes` together.
    """
    stepping = microbatch_bytes(plan)
    state = held_bytes(plan, "total", "device") - held_bytes(plan, "grad", "device")
    return None if stepping is None else state + max(stepping, updating_bytes(plan))


def microbatch_bytes(plan: PlanValue) -> int | None:
    """Peak bytes that micro-batches hold on the device beside the state, gradients included; None without a trace."""
    live = live_bytes(plan)
    if live is None or plan.traces is None:
        return None
    added = plan.stages.axes or plan.step.tree
    return held_bytes(plan, "grad", "device") + live if added else plan.traces[0].peak


def updating_bytes(plan: PlanValue) -> int:
    """Peak bytes that the update holds on the device beside the state: gradients, and new parameters that are gathered.

    All shards are there before the first gather, and two gathers at most are under way: see `shardlib.optim.storing`.
    """
    if len(plan.views) > 1:
        return max(map(updating_bytes, plan.views))
    stays = [bucket for bucket in plan.trained if bucket.memory.optimizer == "device"]
    gathered = [bucket for bucket in plan.trained if bucket.owners(bucket.param_level) > 1]
    live = sum(bucket.size(bucket.grad_level) * bucket.reduce_dtype.itemsize for bucket in stays)
    live += sum(map(_new_shard, gathered))
    peak, under_way = live, deque[Bucket]()
    for bucket in gathered:
        if len(under_way) == 2:
            first = under_way.popleft()
            live -= _rank_major(first) + _new_shard(first)
        under_way.append(bucket)
        live += _rank_major(bucket)
        peak = max(peak, live)
    return peak


def _new_shard(bucket: Bucket) -> int:
    """Bytes of a copy of this rank's share of new parameters, beside those that are stored."""
    in_place = bucket.alone and bucket.memory.optimizer == bucket.memory.param
    return 0 if in_place else bucket.owned * bucket.dtype.itemsize


def _rank_major(bucket: Bucket) -> int:
    """Bytes of a gathered buffer before its leaves are put in order."""
    return 0 if bucket.alone else bucket.size(bucket.param_level) * bucket.dtype.itemsize


def kept_on_host(plan: PlanValue) -> int:
    """Bytes of pinned host memory in which a rank keeps inputs of blocks; 0 when the plan was not traced.

    With several stages, the maximum over ranks.
    """
    if len(plan.views) > 1:
        return max(kept_on_host(view) for view in plan.views)
    in_flight = peak_of_stages(plan.stages.schedule)
    return sum(in_flight[stage] * plan.traces[stage].host for stage in plan.local_stages) if plan.traces else 0
