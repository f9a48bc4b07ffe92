"""`Local`: a rank's parameters as it computes with them, in forms that no step trains."""

from __future__ import annotations

from typing import Any

import torch

from shardlib.errors import IllegalComposition
from shardlib.mesh.mesh import Mesh
from shardlib.mesh.specs import Window
from shardlib.plan.placement import Placement
from shardlib.plan.plan import Plan
from shardlib.sharded.tree import Sharded
from shardlib.tree import Tree, flatten, unflatten


class Local:
    """A rank's leaves under a plan that gathers none: of a `Sharded` tree, or what takes their place, such as quantised ones.

    Attributes:
        plan, mesh: as in `Sharded`.
        tree: the nested tree of leaves, whose slices have no padding.
    """

    def __init__(self, plan: Plan, mesh: Mesh, tree: Tree) -> None:
        self.plan, self.mesh, self.tree = plan, mesh, tree

    @classmethod
    def of(cls, params: Sharded | Local, what: str) -> Local:
        """The leaves of ``params``, in their memory.

        Args:
            what: the function that asks, for the message.

        Raises:
            IllegalComposition: ranks gather parameters for their use, hold stages, or have them on disk.
        """
        if isinstance(params, Local):
            return params
        plan = params.plan
        split = sorted({axis for bucket in plan.buckets for axis in bucket.axes[: bucket.param_level]})
        why = (
            f"each rank holds a share of every parameter (ZeRO stage 3 over {', '.join(split)})"
            if split
            else "each rank holds the blocks of its stages"
            if plan.stages.axes
            else "they are on disk"
            if params.on_disk is not None
            else None
        )
        if why is not None:
            raise IllegalComposition(
                f"{what} takes parameters that each rank holds as it computes with them, and here {why}: gather them, "
                "sl.unshard(params), and shard them by a plan with sl.zero(0), and without stages or disks"
            )
        whole = cls(plan, params.mesh, params.tree)
        cut = [_cut(leaf, *whole.window(placement).sizes[:1]) for placement, leaf in whole.leaves()]
        return whole.with_tree(unflatten(plan.shape.treedef, cut))

    def with_tree(self, tree: Tree) -> Local:
        """The same with other leaves."""
        return Local(self.plan, self.mesh, tree)

    def leaves(self) -> list[tuple[Placement, Any]]:
        """Every leaf with its placement, in the tree's order."""
        return list(zip(self.plan.leaves, flatten(self.tree)[1], strict=True))

    def window(self, placement: Placement) -> Window:
        """The elements of a whole leaf that this rank holds."""
        return placement.compute.spec.window(placement.compute.shape, self.mesh.shape, self.mesh.coords)


def _cut(leaf: torch.Tensor, rows: int = 1) -> torch.Tensor:
    """A leaf without the rows behind the first ``rows``, its padding; of only padding one stays, as slices have it."""
    return leaf[: max(rows, 1)] if leaf.dim() and rows < len(leaf) else leaf
