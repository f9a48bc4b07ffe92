"""Bytes that one rank holds under a plan: of the training state, and at the peak of a step in addition to it."""

from __future__ import annotations

from shardlib.plan.value import ROLES, PlanValue, Trace
from shardlib.schedules import peak_of_stages


def held_bytes(plan: PlanValue, role: str) -> int:
    """Bytes one rank holds of "param", "grad", "optimizer", "comm" or "buffers", padding included, or of all ("total").

    "grad" is the buffer in which gradients are accumulated: whole gradients where they are reduced once at the end, and
    several where they are summed in a tree. With several stages, the maximum over ranks.
    """
    if len(plan.views) > 1:
        return max(held_bytes(view, role) for view in plan.views)
    if role == "param":
        return sum(bucket.size(bucket.param_level) * bucket.dtype.itemsize for bucket in plan.buckets)
    if role == "grad":
        once = sum(bucket.size(bucket.grad_level) * bucket.reduce_dtype.itemsize for bucket in plan.trained)
        return once * plan.step.partial_sums
    if role == "optimizer":
        if plan.needs is None:
            raise ValueError("the plan was made without an optimizer; pass optimizer= to make_plan")
        return max(needs.bytes for needs in plan.needs)
    if role == "comm":
        return sum(channel.bytes for channel in plan.channels)
    if role == "buffers":
        return sum(numel * dtype.itemsize for dtype, numel in plan.buffers)
    if role == "total":
        known = ROLES if plan.needs is not None else ROLES[:2]
        return sum(held_bytes(plan, summand) for summand in (*known, "comm", "buffers"))
    raise ValueError(f"role {role!r} is not one of {', '.join(ROLES)}, comm, buffers, total")


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
    """Peak bytes that a rank holds in a step, apart from its batch; None when the plan was not traced.

    `held_bytes` and `live_bytes` together, or less where gradients come into being while activations go: in a step of one
    micro-batch, in one stage.
    """
    live = live_bytes(plan)
    if live is None or plan.traces is None:
        return None
    total = held_bytes(plan, "total")
    if plan.stages.axes or plan.step.microbatches > 1:
        return total + live
    return total - held_bytes(plan, "grad") + plan.traces[0].peak


def host_bytes(plan: PlanValue) -> int:
    """Bytes of pinned host memory in which a rank keeps inputs of blocks; 0 when the plan was not traced.

    With several stages, the maximum over ranks. On the CPU, whose memory is the host's, inputs stay where they are.
    """
    if len(plan.views) > 1:
        return max(host_bytes(view) for view in plan.views)
    in_flight = peak_of_stages(plan.stages.schedule)
    return sum(in_flight[stage] * trace.host for stage, trace in _traces(plan))


def moved_bytes(plan: PlanValue) -> tuple[int, int]:
    """Bytes of inputs of blocks that a rank moves to host memory in a step, and those that come back: see `host_bytes`."""
    if len(plan.views) > 1:
        down, up = zip(*map(moved_bytes, plan.views))
        return max(down), max(up)
    times = plan.stages.schedule.microbatches
    return (
        times * sum(trace.down for _, trace in _traces(plan)),
        times * sum(trace.up for _, trace in _traces(plan)),
    )


def _traces(plan: PlanValue) -> list[tuple[int, Trace]]:
    """The plan's stages with their traces; empty when it was not traced."""
    return [] if plan.traces is None else [(stage, plan.traces[stage]) for stage in plan.local_stages]
