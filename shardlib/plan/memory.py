"""What one rank holds under a plan: bytes of the state, and at most beside it."""

from __future__ import annotations

from shardlib.plan.value import ROLES, PlanValue
from shardlib.schedules import peak_of_stages


def held_bytes(plan: PlanValue, role: str) -> int:
    """Bytes one rank holds of "param", "grad", "optimizer", "comm" or "buffers", padding included; or "total", of all.

    "grad" is the buffer gradients are accumulated in: whole where they are reduced once at the end. Where ranks have other
    stages, what the rank that holds most holds.
    """
    if len(plan.views) > 1:
        return max(held_bytes(view, role) for view in plan.views)
    if role == "param":
        return sum(bucket.size(bucket.param_level) * bucket.dtype.itemsize for bucket in plan.buckets)
    if role == "grad":
        return sum(bucket.size(bucket.grad_level) * bucket.reduce_dtype.itemsize for bucket in plan.trained)
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
        return sum(held_bytes(plan, part) for part in (*known, "comm", "buffers"))
    raise ValueError(f"role {role!r} is not one of {', '.join(ROLES)}, comm, buffers, total")


def live_bytes(plan: PlanValue) -> int | None:
    """Bytes that a rank holds at most beside `held_bytes`, of a micro-batch; None when not traced.

    That is what operations make, in the first step or a later one: activations and their gradients, passing results,
    gathered parameters, gradients before they are split. It is that of the first of several micro-batches, and leaves
    out what an operation needs only inside itself, what an optimizer does, and gradients that wait for the network.
    With several stages it is a bound, of the rank that holds most: what all micro-batches keep that are on their way, and
    what one that computes needs beyond.
    """
    if plan.traces is None:
        return None
    if len(plan.views) > 1:
        return max(live_bytes(view) or 0 for view in plan.views)
    in_flight, traces = peak_of_stages(plan.stages.schedule), plan.traces
    kept = sum(in_flight[stage] * traces[stage].kept for stage in plan.local_stages)
    return kept + max(traces[stage].live - traces[stage].kept for stage in plan.local_stages)
