"""The time of a step on a machine of our days, by which plans are compared when nobody has said what they will run on."""

from __future__ import annotations

import sys

from shardlib.plan.machine import PRECISIONS, Link, Machine
from shardlib.plan.prediction import predict_on
from shardlib.plan.value import PlanValue

# All ranks as if on one host, whose memories are not limited.
NOMINAL = Machine(
    memory=sys.maxsize,
    flops=dict.fromkeys(PRECISIONS, 2e14),
    inside=Link(5e10),
    ranks_per_host=sys.maxsize,
    launches=2e5,
    ways={"down": 2e10, "up": 2e10, "read": 3e9, "written": 2e9, "update": 2e10},
)


def nominal_seconds(plan: PlanValue) -> float:
    """The seconds of a step."""
    return predict_on(plan, NOMINAL).total
