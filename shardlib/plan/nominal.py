"""The time of a step on a machine of our days, by which plans are compared when nobody has said what they will run on."""

from __future__ import annotations

from collections.abc import Mapping

from shardlib.plan.prediction.step import predict_step
from shardlib.plan.value import PlanValue

FLOPS = 2e14  # operations per second, of one device
AXIS = 5e10  # bytes per second that a rank sends along an axis of the mesh
# Bytes per second of one rank: between device and host, of its share of the disks, and of what its host updates. Then the
# operators per second that a device begins, however small they are (`shardlib doctor --measure` measures that).
LINKS: Mapping[str, float] = {"down": 2e10, "up": 2e10, "read": 3e9, "written": 2e9, "update": 2e10, "launches": 2e5}


def nominal_seconds(plan: PlanValue) -> float:
    """The seconds of a step."""
    forward, backward = map(sum, zip(*(trace.flops for trace in plan.traces or ()), strict=True))
    rates = {**dict.fromkeys(plan.sizes, AXIS), **LINKS}
    return predict_step(plan, forward / FLOPS, rates, backward=backward / forward if forward else 2.0).total
