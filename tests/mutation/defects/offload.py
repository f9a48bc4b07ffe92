"""Defects of states and parameters in other memories than the device's."""

from ..planting import Defect

_OFFLOAD = "tests/training/test_offload.py"
_SAME = f"{_OFFLOAD}::test_training_is_the_same_to_the_last_bit"

DEFECTS = (
    Defect(
        "a clip left out of updates by bucket",
        "factor",
        "optim/updates.py",
        "where buckets are updated one by one, gradients are not clipped",
        "factor = self._optimizer.lead(grads, factor, shards)",
        "factor = factor if scale is None else _number(scale, self._numbers)",
        (f"{_SAME}[stage 1, fp16]",),
    ),
    Defect(
        "states of the last buckets on the device",
        "order",
        "plan/bucketing.py",
        "of a share, the buckets whose gradients come first stay on the device",
        "middle > (1 - at.share) * whole[bucket.homes]",
        "middle < at.share * whole[bucket.homes]",
        (f"{_OFFLOAD}::test_states_lie_where_the_plan_says",),
    ),
    Defect(
        "states joined from the first bucket alone",
        "stale",
        "optim/separate.py",
        "counters are those of the first bucket, and moments of the others are lost",
        "merged = {name: leaf for node in nodes for name, leaf in node.items()}",
        "merged = {name: leaf for node in nodes[:1] for name, leaf in node.items()}",
        (f"{_SAME}[one device]",),
    ),
)
