"""Sums over flat shards in which each element counts once, however many ranks hold it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch

from shardlib.mesh.mesh import Mesh
from shardlib.plan.buckets import Bucket
from shardlib.plan.plan import Plan


class Counting:
    """The elements of shards in the optimizer's layout that this rank counts.

    Args:
        unreduced: axes along which the summed trees differ between ranks. The mean of their sums is then taken.
    """

    def __init__(self, plan: Plan, mesh: Mesh, unreduced: tuple[str, ...] = ()) -> None:
        self._plan, self._mesh, self._unreduced = plan, mesh, unreduced

    @property
    def differing(self) -> int:
        """The number of ranks that hold different trees of the same elements."""
        return math.prod(self._mesh.shape[axis] for axis in self._unreduced)

    def share(self, bucket: Bucket, leaf: torch.Tensor) -> slice:
        """The elements of ``leaf`` that this rank works on, where ranks that hold copies divide the work."""
        start, stop = 0, len(leaf) if self._plan.counts(bucket, self._mesh.coords) else 0
        for axis in self._plan.copies(bucket):
            if axis not in self._unreduced:
                size, index, count = self._mesh.shape[axis], self._mesh.coords[axis], stop - start
                start, stop = start + count * index // size, start + count * (index + 1) // size
        return slice(start, stop)

    def summand(self, fn: Callable[[torch.Tensor], torch.Tensor], bucket: Bucket, leaf: torch.Tensor) -> torch.Tensor:
        """This rank's summand of fn(leaf), as the plan's `Summation` holds it; ``fn`` of padding must be 0."""
        return self._plan.reductions.summation.over(fn, leaf[self.share(bucket, leaf)])

    def added(self, fn: Callable[[torch.Tensor], torch.Tensor], leaves: Iterable[torch.Tensor]) -> torch.Tensor:
        """This rank's summand of Σ fn(leaf) over `differing`, as the plan's `Summation` holds it."""
        return self.total([self._plan.reductions.summation.over(fn, leaf) for leaf in leaves])

    def total(self, summands: list[torch.Tensor]) -> torch.Tensor:
        """The sum of ``summands`` over `differing`, on the rank's device."""
        none = torch.zeros(self._plan.reductions.summation.width, dtype=torch.float64, device=self._mesh.device)
        return (torch.stack(summands).sum(dim=0).to(none.device) if summands else none) / self.differing
