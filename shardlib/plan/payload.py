"""The messages that one rank sends in a step, and their payload bytes (see `shardlib.plan.exchanges.Exchange.payload`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shardlib.common.dtypes import dtype_name
from shardlib.plan.exchanges import Exchange, share, tied_bytes, unowned
from shardlib.plan.value import PlanValue


@dataclass(frozen=True)
class Message:
    """A message that one rank sends over an axis ``times`` times in a step.

    Attributes:
        what: "parameters", "gradients", "activations", "carries" between stages, "tied gradients" between homes,
            "optimizer" or "buffers".
        when: the phase of the step, such as "each micro-batch".
        form: the dtype or the codec in which values are sent.
        payload: bytes of one message.
    """

    what: str
    axis: str
    when: str
    form: str
    payload: int
    times: int = 1

    @property
    def bytes(self) -> int:
        return self.payload * self.times


def payload(plan: PlanValue, *, owned: bool = False) -> dict[str, int]:
    """Axis -> payload bytes one rank sends per step, without scalars.

    Activations and what passes between stages are counted if the plan was traced, the optimizer's messages (whole leaves,
    sums of rows) if the plan was made with an optimizer. With several stages, the maximum over ranks for each axis.

    Args:
        owned: counts a step whose optimizer sums over its axis itself (1-bit Adam, once its variance is frozen).
    """
    totals = []
    for view in plan.views:
        total = {axis: 0 for axis, size in plan.sizes.items() if size > 1}
        for message in messages(view, owned=owned):
            if message.axis in total:
                total[message.axis] += message.bytes
        totals.append(total)
    return {axis: max(total[axis] for total in totals) for axis in totals[0]}


def messages(plan: PlanValue, *, owned: bool = False) -> Iterator[Message]:
    """Every message that one rank sends in a step; ``plan`` is that rank's part of the plan."""
    for stage_plan in plan.stage_plans:
        yield from _gathers(stage_plan.tiled)
        yield from _activations(stage_plan)
    yield from _reductions(plan, owned)
    for bucket in plan.trained:
        for exchange in plan.routes[bucket.name].restore:
            yield _message("parameters", "after the update", exchange)
    for axis, sent in plan.needs[0].payload.items() if plan.needs else ():
        yield Message("optimizer", axis, "in the update", "as it asks", sent)
    yield from _between_stages(plan)
    for dtype, numel, averaged in plan.buffers:
        if averaged:
            for axis in plan.batch_axes:
                mean = 2 * share(numel * dtype.itemsize, plan.sizes[axis])
                yield Message("buffers", axis, "after the last micro-batch", dtype_name(dtype), mean)


def _gathers(stage_plan: PlanValue) -> Iterator[Message]:
    seen: set[str] = set()
    microbatches = stage_plan.stages.schedule.microbatches
    for unit in stage_plan.gathers:
        for bucket in stage_plan.buckets_of[unit]:
            routes = stage_plan.routes[bucket.name]
            for exchange in routes.again if unit in seen else routes.gather:
                yield _message("parameters", "each micro-batch", exchange, microbatches)
        seen.add(unit)


def _activations(stage_plan: PlanValue) -> Iterator[Message]:
    if stage_plan.traces is not None:
        (stage,) = stage_plan.local_stages
        microbatches = stage_plan.stages.schedule.microbatches
        for axis, sent in stage_plan.traces[stage].activations.items():
            yield Message("activations", axis, "each micro-batch", "as computed", sent, microbatches)


def _reductions(plan: PlanValue, owned: bool) -> Iterator[Message]:
    """The reductions of every stage's gradients, and with ``owned`` the optimizer's means, one for each bucket."""
    owner = plan.reductions.owner if owned else None
    each = plan.stages.schedule.microbatches if plan.step.sync == "each" else 1
    for stage_plan in plan.stage_plans:
        again = plan.traces[stage_plan.local_stages[0]].again if plan.traces else ()
        for bucket in stage_plan.tiled.trained:
            if bucket.unit in plan.left_out:
                continue
            routes, times = stage_plan.tiled.routes[bucket.name], 1 + (bucket.name in again)
            for exchange in routes.each:
                yield _message("gradients", "each micro-batch", exchange, times * each)
            for exchange in unowned(routes.last, (owner.axis,) if owner else ()):
                yield _message("gradients", "after the last micro-batch", exchange, times)
    for bucket in plan.trained if owner else ():
        if mean := plan.routes[bucket.name].mean:
            yield _message("gradients", "in the update", mean)


def _between_stages(plan: PlanValue) -> Iterator[Message]:
    """Gradients of tied leaves, sent to the leaves' other homes; and carries with their gradients, if traced."""
    rank_of, microbatches = plan.stages.schedule.rank_of, plan.stages.schedule.microbatches
    for axis in plan.stages.axes:
        for bucket in plan.trained:
            if times := len(bucket.homes) - 1:
                form = dtype_name(bucket.reduce_dtype)
                yield Message("tied gradients", axis, "after the last micro-batch", form, tied_bytes(bucket), times)
        for stage in plan.local_stages if plan.traces else ():
            assert plan.traces is not None
            if stage + 1 < len(rank_of) and rank_of[stage + 1] != rank_of[stage]:
                sent = plan.traces[stage].forward
                yield Message("carries", axis, "each micro-batch", "as computed", sent, microbatches)
            if stage > 0 and rank_of[stage - 1] != rank_of[stage]:
                sent = plan.traces[stage - 1].backward
                yield Message("carries", axis, "each micro-batch", "as computed", sent, microbatches)


def _message(what: str, when: str, exchange: Exchange, times: int = 1) -> Message:
    return Message(what, exchange.axis, when, exchange.form, exchange.payload, times)
