"""The plan of a step, and what plans are made from: transforms, and the claims by which transforms contribute to a plan.

To write a transform, derive a frozen dataclass from `Transform` and define

- ``name``: the transform as a user writes it;
- ``claims(sizes, leaves)``: yields claims, given the mesh's axes (name -> size) and a `LeafInfo` for each parameter. `Use`
  says how a leaf is used, `Reduce` how gradients travel over an axis, `Live` where state lives, `Step` how the step is
  scheduled; there are no other claims. When two transforms make the same claim, the plan is refused, naming both;
- ``check(resolved)``, optional: raises `shardlib.errors.IllegalComposition` if the other transforms in the chain do not
  claim what this one depends on. `conditions` has the checks that several transforms share.
"""

from shardlib.plan import conditions
from shardlib.plan.claims import SECOND, AxisOwner, Claim, LeafInfo, Live, Reduce, Step, Use
from shardlib.plan.loss_scale import LossScale
from shardlib.plan.machine import Link, Machine, Overheads
from shardlib.plan.plan import Plan
from shardlib.plan.stages import Stages
from shardlib.plan.transform import Resolved, Transform

__all__ = [
    # transforms and claims
    "Transform",
    "Claim",
    "Use",
    "Reduce",
    "Live",
    "Step",
    # the plan itself
    "Plan",
    # what it runs on
    "Link",
    "Machine",
    "Overheads",
    # values of claims, and checks
    "AxisOwner",
    "LeafInfo",
    "LossScale",
    "Resolved",
    "SECOND",
    "Stages",
    "conditions",
]
