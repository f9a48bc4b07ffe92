"""Which buckets an optimizer updates together, and in which order."""

from __future__ import annotations

from shardlib.errors import IllegalComposition
from shardlib.optim.base import GradientTransformation
from shardlib.plan.buckets import Bucket
from shardlib.plan.plan import Plan
from shardlib.sharded.on_disk import params_rest


def update_groups(optimizer: GradientTransformation, plan: Plan) -> list[tuple[Bucket, ...]]:
    """The buckets that are updated together, in the order of their updates.

    Raises:
        IllegalComposition: an optimizer that is not elementwise, with states in two memories or updates that run ahead.
    """
    moved = elsewhere(plan)
    on_device = tuple(bucket for bucket in plan.trained if bucket.memory.optimizer == "device")
    if one_by_one(optimizer, plan) and params_rest(plan):  # a bucket's parameters are in memory in its turn alone
        return [(bucket,) for bucket in (*reversed(on_device), *reversed(moved))] or [plan.trained]
    if moved and plan.step.ahead and not optimizer.separable:
        raise IllegalComposition(
            f"offload({plan.step.update}=True) updates one bucket at a time beside other work, and this optimizer reads "
            f"across parameters; leave out {plan.step.update}, or use an elementwise optimizer, such as adamw"
        )
    if not moved or not (optimizer.separable or on_device):
        return [plan.trained]
    if not optimizer.separable:
        raise IllegalComposition(
            f"offload leaves the states of {len(on_device)} of {len(plan.trained)} buckets on the device, and this optimizer "
            "reads across parameters, so that it needs all of them in one memory; use offload(fraction=1.0)"
        )
    return [*([on_device] if on_device else []), *((bucket,) for bucket in reversed(moved))]


def one_by_one(optimizer: GradientTransformation, plan: Plan) -> bool:
    """Whether groups are updated one after the other."""
    return optimizer.separable and (params_rest(plan) or bool(elsewhere(plan)))


def elsewhere(plan: Plan) -> list[Bucket]:
    """The buckets whose states are in another memory than the device's."""
    return [bucket for bucket in plan.trained if bucket.memory.optimizer != "device"]
