"""Choosing, by a trace, how many blocks a plan recomputes so that it fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from shardlib.errors import IllegalComposition
from shardlib.plan.plan import Plan
from shardlib.plan.recompute import Recompute, fewest
from shardlib.plan.tables import size
from shardlib.plan.tiers.limits import Limits


def fitted(plan: Plan, traced: Callable[[Plan], Plan], limits: Limits) -> Plan:
    """The traced plan. "auto" recomputes the fewest blocks with which it fits the limits, or all blocks if none does.

    Raises:
        IllegalComposition: the loss cannot be traced.
    """
    how = plan.step.remat
    if how is None or how.policy != "auto":
        return _traced(plan, traced, limits)
    full = replace(how, policy="full")
    everything = _traced(_recomputing(plan, full), traced, limits)
    count = max(trace.blocks for trace in everything.traces or ())
    plans = {count: replace(_recomputing(plan, replace(full, blocks=count)), traces=everything.traces)}

    def planned(blocks: int) -> Plan:
        if blocks not in plans:
            plans[blocks] = _traced(_recomputing(plan, replace(full, blocks=blocks)), traced, limits)
        return plans[blocks]

    budget = limits.bytes.get("device")
    chosen = 0 if budget is None else fewest(count, lambda blocks: limits.peak(planned(blocks)), budget)
    blocks = count if chosen is None else chosen
    found = planned(blocks)
    note = f"remat('auto'): {blocks} of {count} blocks are recomputed, for a peak of {size(limits.peak(found))}"
    note += f"; with none {size(limits.peak(plans[0]))}" if 0 in plans else ""
    return replace(found, claims=found.claims and found.claims.noting([note]))


def _recomputing(plan: Plan, how: Recompute) -> Plan:
    return replace(plan, step=replace(plan.step, remat=how))


def _traced(plan: Plan, traced: Callable[[Plan], Plan], limits: Limits) -> Plan:
    found = traced(plan)
    if found.traces is None:
        notes = found.claims.notes if found.claims else ()
        why = next((note for note in notes if note.startswith("not traced: ")), "not traced").partition(": ")[2]
        raise IllegalComposition(
            f"{limits.arguments} needs a loss that can be traced, and this one cannot: {why}. Let no size or branch depend "
            "on values: torch.where, masked_fill and weights in place of selections (transformers' experts with "
            "experts_implementation='grouped_mm'); or give no limit"
        )
    return found
