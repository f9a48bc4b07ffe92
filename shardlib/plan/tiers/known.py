"""Traces that are known: plans that differ only in what no micro-batch sees share one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from shardlib.plan.plan import Plan
from shardlib.plan.records import Trace


@dataclass(frozen=True)
class Traced:
    """Traces plans, each kind once: optimizers, their states' files and how these are updated show in no trace.

    Attributes:
        trace: returns a plan with its traces.
    """

    trace: Callable[[Plan], Plan]
    _known: list[tuple[Plan, tuple[Trace, ...]]] = field(default_factory=list)

    def __call__(self, plan: Plan) -> Plan:
        seen = _seen(plan)
        traces = next((traces for known, traces in self._known if known == seen), None)
        if traces is not None:
            return replace(plan, traces=traces)
        found = self.trace(plan)
        if found.traces is not None:
            self._known.append((seen, found.traces))
        return found


def _seen(plan: Plan) -> Plan:
    """What of a plan a micro-batch sees."""
    step, how = plan.step, plan.step.remat
    if how is not None and how.blocks == 0 and not how.save:
        step = replace(step, remat=None)
    buckets = tuple(
        replace(bucket, memory=bucket.memory._replace(optimizer="host"))
        if bucket.memory.optimizer != "device"
        else bucket
        for bucket in plan.buckets
    )
    return replace(plan, step=step, buckets=buckets, needs=None)


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

    return tuple(Trace((), {}, flops=least(t.flops, share), launches=least(t.launches, 1.0)) for t in before.traces)
