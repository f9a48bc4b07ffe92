"""Choosing, by a trace, how many blocks a plan recomputes so that it fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from shardlib.errors import IllegalComposition
from shardlib.plan.plan import Plan
from shardlib.plan.recompute import fewest
from shardlib.plan.tables import size
from shardlib.plan.tiers.limits import Limits


def fitted(plan: Plan, traced: Callable[[Plan], Plan], limits: Limits) -> Plan:
    """The traced plan. "auto" recomputes the fewest blocks with which it fits the limits, or all blocks if none does.

    Raises:
        IllegalComposition: the loss cannot be traced.
    """
    how = plan.step.remat
    plans: dict[int | None, Plan] = {}

    def planned(blocks: int | None) -> Plan:
        if blocks not in plans:
            remat = how if how is None or blocks is None else replace(how, policy="full", blocks=blocks)
            plans[blocks] = found = traced(replace(plan, step=replace(plan.step, remat=remat)))
            if found.traces is None:
                raise IllegalComposition(
                    f"{limits.arguments} needs a loss that can be traced, and this one reads values"
                )
        return plans[blocks]

    if how is None or how.policy != "auto":
        return planned(None)
    count = max(trace.blocks for trace in planned(0).traces or ())
    budget = limits.bytes.get("device")
    chosen = 0 if budget is None else fewest(count, lambda blocks: limits.peak(planned(blocks)), budget)
    found = planned(count if chosen is None else chosen)
    note = f"remat('auto'): {found.step.remat.blocks if found.step.remat else 0} of {count} blocks are recomputed"
    note += f", for a peak of {size(limits.peak(found))}; with none {size(limits.peak(planned(0)))}"
    return replace(found, claims=found.claims and found.claims.noting([note]))
