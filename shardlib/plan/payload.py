"""What one rank sends in a step that follows a plan: payload bytes, by the algorithms' own volume."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardlib.plan.buckets import Bucket
from shardlib.schedules import Pipeline

if TYPE_CHECKING:
    from shardlib.plan.plan import Plan


def payload(plan: Plan, owned: bool) -> dict[str, int]:
    """See `shardlib.plan.plan.Plan.payload`."""
    if len(plan.views) > 1:
        views = [payload(view, owned) for view in plan.views]
        return {axis: max(view[axis] for view in views) for axis in views[0]}
    total = dict.fromkeys(plan.sizes, 0)
    for part in plan.parts:
        _add_microbatches(total, part, owned)
    if owned and plan.owned is not None:
        total[plan.owned.axis] += sum(channel.payload for channel in plan.owned_channels)
    for bucket in plan.trained:
        for level in range(bucket.param_level, bucket.levels):
            total[bucket.axes[level]] += share(bucket.size(level) * bucket.dtype.itemsize, bucket.sizes[level])
    for axis, sent in plan.optimizer_payload[0].items() if plan.optimizer_payload else ():
        total[axis] += sent
    if plan.pipeline is not None:
        _add_messages(total, plan, plan.pipeline)
    for dtype, numel in plan.buffers:
        if dtype.is_floating_point or dtype.is_complex:  # averaged over the ranks
            for axis in plan.batch_axes:
                total[axis] += 2 * share(numel * dtype.itemsize, plan.sizes[axis])
    return {axis: count for axis, count in total.items() if plan.sizes[axis] > 1}


def share(whole: int, ways: int) -> int:
    """What one rank sends of ``whole`` bytes that are gathered, or reduced and scattered, over ``ways`` ranks."""
    return whole * (ways - 1) // ways


def gather_bytes(plan: Plan, bucket: Bucket, level: int) -> int:
    """What one rank sends where a bucket's parameters are gathered for use, from level ``level`` + 1."""
    axis, size = bucket.axes[level], bucket.sizes[level]
    if axis in plan.packings and bucket.dtype.is_floating_point:
        return (size - 1) * plan.packings[axis].size(bucket.size(level + 1))
    return share(bucket.size(level) * bucket.dtype.itemsize, size)


def scatter_bytes(plan: Plan, bucket: Bucket, level: int) -> int:
    """What one rank sends where a bucket's gradients are reduced to level ``level`` + 1."""
    found = plan.channel_payload.get((bucket.name, bucket.axes[level]))
    return share(bucket.size(level) * bucket.reduce_dtype.itemsize, bucket.sizes[level]) if found is None else found


def sum_bytes(plan: Plan, bucket: Bucket, axis: str) -> int:
    """What one rank sends where a bucket's gradients are summed over an axis of its replicas."""
    found = plan.channel_payload.get((bucket.name, axis))
    whole = 2 * bucket.size(bucket.levels) * bucket.reduce_dtype.itemsize
    return share(whole, plan.sizes[axis]) if found is None else found


def _add_microbatches(total: dict[str, int], plan: Plan, owned: bool) -> None:
    """What all micro-batches gather, and their gradients."""
    for axis, sent in (plan.activations or {}).items():
        total[axis] += plan.microbatches * sent
    reductions = plan.microbatches if plan.sync == "each" else 1
    seen: set[str] = set()
    for unit in plan.gathers():
        for bucket in plan.buckets:
            if bucket.unit == unit:
                stop = plan.second_level if unit in seen and plan.second_level is not None else bucket.param_level
                for level in range(stop):
                    total[bucket.axes[level]] += plan.microbatches * gather_bytes(plan, bucket, level)
        seen.add(unit)
    for bucket in plan.trained:
        for level, axis in enumerate(bucket.axes):
            times = reductions if level < bucket.grad_level else 1
            total[axis] += times * scatter_bytes(plan, bucket, level)
        for axis in bucket.replicas:
            if not (owned and plan.owned and plan.owned.axis == axis):
                total[axis] += sum_bytes(plan, bucket, axis)


def _add_messages(total: dict[str, int], plan: Plan, pipeline: Pipeline) -> None:
    """Gradients of tied leaves to their other homes; and, where traced, carries and their gradients."""
    for bucket in plan.trained:
        own = bucket.size(bucket.levels) * bucket.reduce_dtype.itemsize
        total[pipeline.axis] += (len(bucket.homes) - 1) * own
    if plan.traces is None:
        return
    rank_of = pipeline.schedule.rank_of
    for stage in plan.local_stages:
        if stage + 1 < len(rank_of) and rank_of[stage + 1] != rank_of[stage]:
            total[pipeline.axis] += plan.microbatches * plan.traces[stage].forward
        if stage > 0 and rank_of[stage - 1] != rank_of[stage]:
            total[pipeline.axis] += plan.microbatches * plan.traces[stage - 1].backward
