"""The groups of buckets that an optimizer updates together, in the order of their updates."""

from __future__ import annotations

from shardlib.errors import IllegalComposition
from shardlib.optim.base import GradientTransformation
from shardlib.optim.separate import turns
from shardlib.plan.buckets import Bucket
from shardlib.plan.plan import Plan


def update_groups(optimizer: GradientTransformation, plan: Plan) -> list[tuple[Bucket, ...]]:
    """The buckets that are updated together, in the order of their updates.

    Raises:
        IllegalComposition: an optimizer that is not elementwise, with states in two memories or updates that run ahead.
    """
    moved = any(bucket.memory.optimizer != "device" for bucket in plan.trained)
    on_device = tuple(bucket for bucket in plan.trained if bucket.memory.optimizer == "device")
    if moved and plan.step.ahead and not optimizer.separable:
        raise IllegalComposition(
            f"offload({plan.step.update}=True) updates one bucket at a time beside other work, and this optimizer reads "
            f"across parameters; leave out {plan.step.update}, or use an elementwise optimizer, such as adamw"
        )
    if optimizer.in_turn(plan):
        return turns(plan)
    if moved and on_device:
        raise IllegalComposition(
            f"offload leaves the states of {len(on_device)} of {len(plan.trained)} buckets on the device, and this optimizer "
            "reads across parameters, so that it needs all of them in one memory; use offload(fraction=1.0)"
        )
    return [plan.trained]
