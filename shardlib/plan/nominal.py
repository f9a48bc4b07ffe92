"""The time of a step on a machine of our days, by which plans are compared when nobody has said what they will run on."""

from __future__ import annotations

from collections.abc import Mapping

from shardlib.plan.predict import predict_step
from shardlib.plan.transfers import moved
from shardlib.plan.value import PlanValue

FLOPS = 2e14  # operations per second, of one device
AXIS = 5e10  # bytes per second that a rank sends along an axis of the mesh
LINKS: Mapping[str, float] = {"down": 2e10, "up": 2e10, "read": 3e9, "written": 2e9}  # bytes per second of one rank


def nominal_seconds(plan: PlanValue) -> float:
    """The seconds of a step."""
    forward, backward = map(sum, zip(*(trace.flops for trace in plan.traces or ()), strict=True))
    step = predict_step(
        plan, forward / FLOPS, dict.fromkeys(plan.sizes, AXIS), backward=backward / forward if forward else 2.0
    )
    return step.total + sum(sent / LINKS[way] for way, sent in moved(plan).items())
