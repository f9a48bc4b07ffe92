"""The time that a plan predicts of a step, at the rates that were measured in it."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence

from shardlib.mesh.mesh import coordinates
from shardlib.plan.plan import Plan
from shardlib.plan.prediction import StepTime, predict_step
from shardlib.report.profile.meetings import meetings
from shardlib.report.profile.recording import RecordedStep, Recording


def predicted(plan: Plan, recording: Recording) -> StepTime:
    """The plan's step on the virtual clock, with measured seconds of computation and measured bandwidths."""
    times = [_of(steps) for steps in recording.ranks]
    forward = _of_all_stages(plan, recording.sizes, [of["forward"] for of in times])
    backward = _of_all_stages(plan, recording.sizes, [of["backward"] for of in times])
    return predict_step(
        plan,
        forward / plan.stages.schedule.microbatches,
        _bandwidths(recording),
        backward=backward / forward if forward else 0.0,
        update=statistics.fmean(of["update"] for of in times),
        owned=_owned(plan, recording.steps),
    )


def _owned(plan: Plan, steps: Sequence[RecordedStep]) -> bool:
    """Whether the optimizer summed over its axis itself in these steps (1-bit Adam, once its variance is frozen): by the
    bytes that were sent along it."""
    if plan.reductions.owner is None:
        return False
    axis = plan.reductions.owner.axis
    sent = statistics.fmean(sum(each.payload for each in step.exchanges if each.axis == axis) for step in steps)
    before, since = (abs(sent - plan.payload(owned=owned).get(axis, 0)) for owned in (False, True))
    return since < before


def _of(steps: Sequence[RecordedStep]) -> Mapping[str, float]:
    """Median seconds of forward, of backward with what is computed again, and of the rest in which nothing is waited for:
    optimizer, offload, starting exchanges, Python."""
    taken: defaultdict[str, list[float]] = defaultdict(lambda: [0.0] * len(steps))
    for number, step in enumerate(steps):
        for part, seconds in step.own().items():
            if part.kind == "compute":
                taken["forward" if part.way == "forward" else "backward"][number] += seconds
            elif part.kind != "wait":
                taken["update"][number] += seconds
    return {name: statistics.median(taken[name]) for name in ("forward", "backward", "update")}


def _of_all_stages(plan: Plan, sizes: Mapping[str, int], seconds: Sequence[float]) -> float:
    """The sum over the coordinates of the stages' axis of the mean over the ranks there."""
    homes: defaultdict[int, list[float]] = defaultdict(list)
    for rank, taken in enumerate(seconds):
        homes[plan.stages.home(coordinates(sizes, rank)) if plan.stages.axes else 0].append(taken)
    return sum(map(statistics.fmean, homes.values()))


def _bandwidths(recording: Recording) -> dict[str, float]:
    """Axis -> bytes per second of one rank, from exchanges that somebody waited for: others end unseen."""
    sent: defaultdict[str, int] = defaultdict(int)
    taken: defaultdict[str, float] = defaultdict(float)
    for steps in zip(*recording.ranks, strict=True):
        for meeting in meetings(recording.sizes, steps):
            if meeting.payload and meeting.waited > meeting.seconds / 2 > 0:
                sent[meeting.first.axis] += meeting.payload
                taken[meeting.first.axis] += meeting.seconds
    return {axis: sent[axis] / taken[axis] for axis in sent}
