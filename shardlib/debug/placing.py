"""The parameters of a plan before its first step."""

from __future__ import annotations

from shardlib.debug.finding import Finding
from shardlib.debug.view import StepView


def placing(view: StepView) -> Finding | None:
    """A parameter that is not where the plan says, before the first step."""
    found = view.first_leaf(view.device.used(), view.replay.start, "param") if view.number == 0 else None
    if found is None:
        return None
    _, path, bad = found
    spec = view.plan.placement_of[path].param.spec
    return view.finding("placing", f"the shards of parameters, by {spec!r}", bad, leaf=path)
