"""The plan of a step, and what it is made from: transforms, which say things about leaves, axes and the step by claims.

A transform of one's own is a frozen dataclass that derives from `Transform` and gives

- ``name``: as a user writes it;
- ``claims(sizes, leaves)``: yields claims, from the mesh's axes (name -> size) and the parameters (a `LeafInfo` each). `Use`
  says how a leaf is used, `Reduce` how gradients travel over an axis, `Live` where state lives, `Step` how the step is
  scheduled; nothing else can be said. Two transforms that say different things of one subject are refused by name;
- ``check(resolved)``, where it needs something of the others in its chain: raises `shardlib.errors.IllegalComposition`.
"""

from shardlib.plan import conditions
from shardlib.plan.claims import Claim, LeafInfo, Live, Reduce, Step, Use
from shardlib.plan.resolved import Resolved
from shardlib.plan.transform import Transform

__all__ = ["Claim", "LeafInfo", "Live", "Reduce", "Resolved", "Step", "Transform", "Use", "conditions"]
