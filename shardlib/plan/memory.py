"""Bytes that one rank holds under a plan: of the training state, at the peak of a step, and why every memory has its peak."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from shardlib.common.disk import whole_blocks
from shardlib.mesh.memories import MEMORIES, scratch_window, window
from shardlib.plan.buckets import Bucket
from shardlib.plan.tables import size
from shardlib.plan.value import PlanValue
from shardlib.schedules import peak_of_stages

ROLE_NAMES = {
    "param": "parameters",
    "grad": "gradients",
    "optimizer": "optimizer",
    "comm": "residuals",
    "buffers": "buffers",
}
_STEP = "gradients, activations and gathered parameters"


def held_bytes(plan: PlanValue, role: str, memory: str | None = None) -> int:
    """Bytes one rank holds of "param", "grad", "optimizer", "comm" or "buffers", padding included, or of all ("total").

    In one ``memory`` (see `shardlib.mesh.memories`), or by default in all. "grad" is the buffer in which gradients are
    accumulated: whole gradients where they are reduced once at the end, and several where they are summed in a tree. Where
    gradients go to another memory for the update, it is their memory there, and on the device what is held until they go:
    the accumulated gradients of several micro-batches, or at most two units of one. With several stages, the maximum over
    ranks.
    """
    if role not in (*ROLE_NAMES, "total"):
        raise ValueError(f"role {role!r} is not one of {', '.join(ROLE_NAMES)}, total")
    if role == "optimizer" and plan.needs is None:
        raise ValueError("the plan was made without an optimizer; pass optimizer= to make_plan")
    if len(plan.views) > 1:
        return max(held_bytes(view, role, memory) for view in plan.views)
    held = (_HELD[each](plan) for each in (ROLE_NAMES if role == "total" else (role,)))
    return sum(count for each in held for where, count in each if memory in (None, where))


# Role -> memories, each with bytes that a rank holds there. A memory may come several times.


def _parameters(plan: PlanValue) -> Iterator[tuple[str, int]]:
    for bucket in plan.buckets:
        for part in bucket.cut:
            stored = part.size(part.param_level) * part.dtype.itemsize
            yield bucket.memory.param, MEMORIES[bucket.memory.param].held(stored)
    if sizes := resting_sizes(plan):  # all parameters are in one memory
        yield MEMORIES[plan.buckets[0].memory.param].works, window(list(sizes.values()))


def _gradients(plan: PlanValue) -> Iterator[tuple[str, int]]:
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


_HELD: Mapping[str, Callable[[PlanValue], Iterable[tuple[str, int]]]] = {
    "param": _parameters,
    "grad": _gradients,
    "optimizer": lambda plan: max((needs.bytes for needs in plan.needs or ()), key=_whole, default={}).items(),
    "comm": lambda plan: (("device", channel.bytes) for channel in plan.channels),
    "buffers": lambda plan: (("device", numel * dtype.itemsize) for dtype, numel, _ in plan.buffers),
}


def _whole(held: Mapping[str, int]) -> int:
    return sum(held.values())


def resting_sizes(plan: PlanValue) -> dict[str, int]:
    """Unit -> bytes of host memory that its parameters take while they pass through, for units on disk."""
    sizes: dict[str, int] = {}
    for bucket in plan.buckets:
        if MEMORIES[bucket.memory.param].rests:
            held = sum(whole_blocks(part.size(part.param_level) * part.dtype.itemsize) for part in bucket.cut)
            sizes[bucket.unit] = sizes.get(bucket.unit, 0) + held
    return sizes


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
    """Peak bytes that a rank holds in addition to ``bytes("total")`` during a micro-batch; None without a trace.

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
    several stages, and in a tree of sums, at most ``bytes("total")`` and ``live_bytes`` together.
    """
    stepping = _microbatch_bytes(plan)
    state = held_bytes(plan, "total", "device") - held_bytes(plan, "grad", "device")
    return None if stepping is None else state + max(stepping, _updating_bytes(plan))


def _microbatch_bytes(plan: PlanValue) -> int | None:
    """Peak bytes that micro-batches hold on the device beside the state, gradients included; None without a trace."""
    live = live_bytes(plan)
    if live is None or plan.traces is None:
        return None
    added = plan.stages.axes or plan.step.tree
    return held_bytes(plan, "grad", "device") + live if added else plan.traces[0].peak


def _updating_bytes(plan: PlanValue) -> int:
    """Peak bytes that the update holds on the device beside the state: gradients, and new parameters that are gathered.

    All shards are there before the first gather, and two gathers at most are under way: see `shardlib.optim.storing`.
    """
    if len(plan.views) > 1:
        return max(map(_updating_bytes, plan.views))
    stays = [bucket for bucket in plan.trained if bucket.memory.optimizer == "device"]
    gathered = [bucket for bucket in plan.trained if bucket.owners(bucket.param_level) > 1]

    def shard(bucket: Bucket) -> int:
        """A copy of this rank's share of new parameters, beside those that are stored."""
        in_place = bucket.alone and bucket.memory.optimizer == bucket.memory.param
        return 0 if in_place else bucket.owned * bucket.dtype.itemsize

    def packed(bucket: Bucket) -> int:
        """A gathered buffer before its leaves are put in order."""
        return 0 if bucket.alone else bucket.size(bucket.param_level) * bucket.dtype.itemsize

    live = sum(bucket.size(bucket.grad_level) * bucket.reduce_dtype.itemsize for bucket in stays)
    live += sum(map(shard, gathered))
    peak = live
    for number in range(len(gathered)):
        if number > 1:
            live -= shard(gathered[number - 2])
        peak = max(peak, live + sum(map(packed, gathered[max(0, number - 1) : number + 1])))
    return peak


@dataclass(frozen=True)
class MemoryPeak:
    """The peak of one memory on one rank.

    Attributes:
        memory: one of `shardlib.mesh.memories.MEMORIES`.
        when: the phase of the step, such as "backward of block 3".
        parts: what is held then, in words -> bytes.
    """

    memory: str
    when: str
    parts: Mapping[str, int]

    @property
    def bytes(self) -> int:
        return sum(self.parts.values())

    def __str__(self) -> str:
        parts = " + ".join(f"{what} {size(count)}" for what, count in self.parts.items())
        return f"{size(self.bytes)} in {self.memory} memory, {self.when}: {parts}"


def memory_peaks(view: PlanValue, batch: int = 0) -> dict[str, MemoryPeak]:
    """Memory -> its peak on the ranks of one part of a plan; memories that hold nothing are left out.

    Args:
        view: a plan, or one of its `views`. If it was not traced, the device holds more than is counted.
        batch: bytes of a rank's batch, which lies on the device.
    """
    found = (_device(view, batch), _host(view), MemoryPeak("disk", "at all times", _state(view, "disk")))
    return {peak.memory: peak for peak in found if peak.bytes}


def _state(view: PlanValue, memory: str, without: str = "") -> dict[str, int]:
    """What is held of the training state, in words -> bytes."""
    roles = [role for role in ROLE_NAMES if role != without and (role != "optimizer" or view.needs is not None)]
    held = {ROLE_NAMES[role]: held_bytes(view, role, memory) for role in roles}
    return {what: count for what, count in held.items() if count}


def _device(view: PlanValue, batch: int) -> MemoryPeak:
    """The device's peak. Gradients come into being while activations go, so both are one number."""
    parts = _state(view, "device", without="grad")
    state, parts = sum(parts.values()), parts | ({"batch": batch} if batch else {})
    peak = peak_bytes(view)
    if peak is None or view.traces is None:
        return MemoryPeak("device", "at all times", parts)
    in_flight, traces = peak_of_stages(view.stages.schedule), view.traces
    stage = max(view.local_stages, key=lambda stage: traces[stage].live - traces[stage].kept)
    together = peak == held_bytes(view, "total", "device") + (live_bytes(view) or 0)
    when = f"in {traces[stage].live_in if together else traces[stage].peak_in}"
    if peak - state > (_microbatch_bytes(view) or 0):
        when = "in the update"
    elif view.stages.axes:
        held = sum(in_flight[number] for number in view.local_stages)
        when += f", with {held} micro-batch{'es' * (held > 1)} in flight"
    return MemoryPeak("device", when, parts | {_STEP: peak - state})


def _host(view: PlanValue) -> MemoryPeak:
    """The host's peak. Its memory is pinned and reused, so it is held from the first time that it is needed."""
    in_flight, traces = peak_of_stages(view.stages.schedule), view.traces
    inputs = sum(in_flight[stage] * traces[stage].host for stage in view.local_stages) if traces else 0
    more = {
        "inputs of blocks": inputs,
        "summands of gradients": sum(traces[stage].summands for stage in view.local_stages) if traces else 0,
        "parameters on their way": max((needs.staged for needs in view.needs or ()), default=0),
    }
    parts = _state(view, "host") | {what: count for what, count in more.items() if count}
    resting = [bucket for bucket in view.trained if MEMORIES[bucket.memory.optimizer].rests]
    if resting:
        widest = max(resting, key=lambda bucket: bucket.owned)
        return MemoryPeak("host", f"in the update of bucket {widest.name}", parts)
    return MemoryPeak("host", "from the end of forward" if inputs else "at all times", parts)
