"""The values of a sharded tree, for another plan or another mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from shardlib.sharded.tree import Sharded
from shardlib.sharded.unshard import whole_leaves
from shardlib.tree import unflatten


class Resharded:
    """Sharded parameters as something to be sharded: its tree has the whole leaves' shapes, and `replay` their values, one
    bucket after the other."""

    def __init__(self, params: Sharded) -> None:
        self._params, plan = params, params.plan.everywhere
        like = {
            leaf.path: torch.empty(leaf.compute.shape, dtype=leaf.compute.dtype, device="meta") for leaf in plan.leaves
        }
        self.tree = unflatten(
            plan.shape.treedef, [like[leaf.path] for leaf in plan.leaves]
        )  # tied leaves are one tensor

    def replay(self, paths: Mapping[int, str], take: Callable[[str, torch.Tensor], None]) -> None:
        """Give each leaf's path and value to ``take``."""
        for path, value in whole_leaves(self._params):
            take(path, value)
