"""What one rank sends in a step that follows a plan: every message, and payload bytes by the algorithms' own volume."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shardlib.plan.exchanges import Exchange, share, tied_bytes, unowned
from shardlib.plan.value import PlanValue


@dataclass(frozen=True)
class Message:
    """What one rank sends over an axis, as often as it does in a step.

    Attributes:
        what: "parameters", "gradients", "activations", "carries" between stages, "tied gradients" between homes,
            "optimizer" or "buffers".
        when: in which part of the step.
        form: how it travels: a dtype or a codec.
        payload: bytes of one; ``times`` of them are sent.
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
    """Payload bytes one rank sends per step, by axis, scalars apart.

    With what the loss sends itself (activations) where the plan was traced, and what the optimizer does (whole leaves,
    sums of rows) where it was made with one. Where ranks have other stages, by axis what the rank that sends most sends;
    what passes between stages only when traced.

    Args:
        owned: of a step whose optimizer sums over its own axis itself (1-bit Adam, once its variance is frozen).
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
    """Every message of a step of one rank, ``plan`` being its part."""
    for part in plan.stage_plans:
        yield from _gathers(part)
        yield from _activations(part)
    yield from _reductions(plan, owned)
    for bucket in plan.trained:
        for exchange in plan.routes[bucket.name].restore:
            yield _message("parameters", "after the update", exchange)
    for axis, sent in plan.needs[0].payload.items() if plan.needs else ():
        yield Message("optimizer", axis, "in the update", "as it asks", sent)
    yield from _between_stages(plan)
    for dtype, numel in plan.buffers:
        if dtype.is_floating_point or dtype.is_complex:  # averaged over the ranks
            for axis in plan.batch_axes:
                mean = 2 * share(numel * dtype.itemsize, plan.sizes[axis])
                yield Message("buffers", axis, "after the last micro-batch", _name(dtype), mean)


def _gathers(part: PlanValue) -> Iterator[Message]:
    seen: set[str] = set()
    for unit in part.gathers:
        for bucket in part.buckets_of[unit]:
            routes = part.routes[bucket.name]
            for exchange in routes.again if unit in seen else routes.gather:
                yield _message("parameters", "each micro-batch", exchange, part.stages.schedule.microbatches)
        seen.add(unit)


def _activations(part: PlanValue) -> Iterator[Message]:
    if part.traces is not None:
        (stage,) = part.local_stages
        for axis, sent in part.traces[stage].activations.items():
            yield Message(
                "activations", axis, "each micro-batch", "as computed", sent, part.stages.schedule.microbatches
            )


def _reductions(plan: PlanValue, owned: bool) -> Iterator[Message]:
    """Each stage reduces what it has of a bucket; the optimizer makes one mean of it."""
    owner = plan.reductions.owner if owned else None
    each = plan.stages.schedule.microbatches if plan.step.sync == "each" else 1
    for part in plan.stage_plans:
        for bucket in part.trained:
            routes = part.routes[bucket.name]
            for exchange in routes.each:
                yield _message("gradients", "each micro-batch", exchange, each)
            for exchange in unowned(routes.last, (owner.axis,) if owner else ()):
                yield _message("gradients", "after the last micro-batch", exchange)
    for bucket in plan.trained if owner else ():
        if mean := plan.routes[bucket.name].mean:
            yield _message("gradients", "in the update", mean)


def _between_stages(plan: PlanValue) -> Iterator[Message]:
    """Gradients of tied leaves to their other homes; and, where traced, carries and their gradients."""
    rank_of, microbatches = plan.stages.schedule.rank_of, plan.stages.schedule.microbatches
    for axis in plan.stages.axes:
        for bucket in plan.trained:
            if times := len(bucket.homes) - 1:
                form = _name(bucket.reduce_dtype)
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


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
