"""Traces that are known: plans that differ only in what no micro-batch sees share one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from shardlib.plan.plan import Plan
from shardlib.plan.records import Trace


class KindTracer:
    """Traces plans, each kind once: optimizers, their states' files and how these are updated show in no trace.

    Plans of deep functions are traced in short forms. Unless these surely show what the whole would, the first plan is traced
    as a whole, and the next ones in short forms if that of the first one gives the same.

    Args:
        trace: returns a plan with its traces.
        shortly: returns the traces of a plan from a short form; None where none shows them.
        sure: whether a short form that shows any traces shows those of the whole.
    """

    def __init__(
        self,
        trace: Callable[[Plan], Plan],
        shortly: Callable[[Plan], tuple[Trace, ...] | None],
        sure: bool = False,
    ) -> None:
        self._trace, self._shortly, self._sure = trace, shortly, sure
        self._known: list[tuple[Plan, tuple[Trace, ...], bool]] = []  # and whether they are of the whole function
        self._first: tuple[Plan, tuple[Trace, ...]] | None = None  # what the first short form is held against
        self._trusts: bool | None = sure or None  # None before the first short form

    def __call__(self, plan: Plan) -> Plan:
        """The plan with its traces."""
        seen = seen_in_traces(plan)
        traces = next((traces for known, traces, _ in self._known if known == seen), None)
        if traces is None:
            traces, whole = self._traces(plan)
            if traces is None:
                return self._trace(plan)
            self._known.append((seen, traces, whole))
        return replace(plan, traces=traces)

    def _traces(self, plan: Plan) -> tuple[tuple[Trace, ...] | None, bool]:
        """The traces of a plan, if it can be traced, and whether they are of the whole function."""
        if self._trusts is None and self._first is not None:
            first, whole = self._first
            short = self._shortly(first)
            self._first, self._trusts = None, None if short is None else short == whole
        short = self._shortly(plan) if self._trusts else None
        if short is not None:
            return short, False
        found = self._trace(plan).traces
        if self._trusts is None and found is not None:
            self._first = plan, found
        return found, True

    def holds(self, plan: Plan) -> bool:
        """Whether a plan's traces are those of the whole function. If they are not, no short form is trusted from now on."""
        if self._sure:
            return True
        seen = seen_in_traces(plan)
        if any(whole and known == seen for known, _, whole in self._known):
            return True
        found = self._trace(plan).traces
        self._known = [each for each in self._known if each[0] != seen]
        if found is not None:
            self._known.append((seen, found, True))
        if found == plan.traces:
            return True
        self._trusts = False
        self._known = [each for each in self._known if each[2]]
        return False


def seen_in_traces(plan: Plan) -> Plan:
    """What of a plan a micro-batch sees."""
    step, how = plan.step, plan.step.remat
    if how is not None and how.blocks == 0 and not how.save:
        step = replace(step, remat=None)
    placements, other = plan.placements, "host"
    if plan.stages.axes:  # gradients leave for the states' memory after all micro-batches
        placements, other = tuple(replace(placement, optimizer=None) for placement in placements), "device"
    buckets = tuple(
        replace(bucket, memory=bucket.memory._replace(optimizer=other))
        if bucket.memory.optimizer != "device"
        else bucket
        for bucket in plan.buckets
    )
    return replace(plan, step=step, placements=placements, buckets=buckets, needs=None, traces=None)


def assumed(before: Plan, after: Plan) -> tuple[Trace, ...] | None:
    """At most what a trace of ``after`` would find, from the traces of a plan with one transform less or other.

    A step has the same operations in forward, and no fewer in backward, but for what ``before`` recomputes. Smaller
    micro-batches have their share of the elements, as each row is computed alone, and all of the launches. Nobody knows how
    little activations may take.
    """
    if before.traces is None or len(before.traces) != after.stages.count:
        return None
    share = before.step.microbatches / after.step.microbatches
    again = before.step.remat is not None

    def least(of: tuple[int, int], share: float) -> tuple[int, int]:
        forward, backward = of
        return int(share * forward), int(share * max(0, backward - again * forward))

    return tuple(Trace(None, {}, flops=least(t.flops, share), launches=least(t.launches, 1.0)) for t in before.traces)
