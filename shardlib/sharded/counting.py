"""Sums over flat shards in which each element counts once, however many ranks hold it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch

from shardlib.mesh.mesh import Mesh
from shardlib.plan.buckets import Bucket
from shardlib.plan.plan import Plan


class Counting:
    """Which elements of shards in the optimizer's layout are this rank's to count.

    Args:
        unreduced: axes along which the trees that are summed over differ: sums are then the means over these ranks'.
    """

    def __init__(self, plan: Plan, mesh: Mesh, unreduced: tuple[str, ...] = ()) -> None:
        self._plan, self._mesh, self._unreduced = plan, mesh, unreduced

    @property
    def differing(self) -> int:
        """The number of ranks whose trees differ though they are of the same elements."""
        return math.prod(self._mesh.shape[axis] for axis in self._unreduced)

    def share(self, bucket: Bucket, leaf: torch.Tensor) -> slice:
        """This rank's share of the work on elements that others hold copies of."""
        start, stop = 0, len(leaf) if self._plan.counts(bucket, self._mesh.coords) else 0
        for axis in self._plan.copies(bucket):
            if axis not in self._unreduced:
                size, mine, count = self._mesh.shape[axis], self._mesh.coords[axis], stop - start
                start, stop = start + count * mine // size, start + count * (mine + 1) // size
        return slice(start, stop)

    def local_sum(self, fn: Callable[[torch.Tensor], torch.Tensor], tree: dict[str, torch.Tensor]) -> torch.Tensor:
        """This rank's part of Σ fn(leaf), 0-d, of a function that gives 0 of padding."""
        return self.added(fn(leaf[self.share(self._plan.bucket_of[name], leaf)]) for name, leaf in tree.items())

    def added(self, parts: Iterable[torch.Tensor]) -> torch.Tensor:
        """The sum of 0-d tensors, a share of it where ranks' trees differ; float64 zero of none."""
        found = list(parts)
        total = torch.stack(found).sum() if found else torch.zeros((), dtype=torch.float64, device=self._mesh.device)
        return total / self.differing
