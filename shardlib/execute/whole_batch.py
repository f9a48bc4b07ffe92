"""The rows of all ranks that have different shares of the batch, for losses that compare rows with each other."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from shardlib.collectives import pairs, primitives
from shardlib.errors import LossError
from shardlib.execute.meeting import meeting_in_backward
from shardlib.mesh.mesh import Mesh
from shardlib.mesh.transport.activity import naming
from shardlib.plan.plan import Plan


class WholeBatch:
    """The rows of all ranks, as `shardlib.nn.batch.BatchRows`.

    Args:
        trained: whether micro-batches are those of a step.
        meet: brings the ranks together before an exchange; see `Meeting`.

    Attributes:
        axes: axes over which the batch varies, major to minor.
    """

    def __init__(self, plan: Plan, mesh: Mesh, trained: bool, meet: Callable[[], None]) -> None:
        self.axes = plan.batch_axes
        self._mesh, self._meet = mesh, meet
        self._microbatches = (plan.step.total_microbatches or plan.step.microbatches) if trained else 1

    def gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        if self._microbatches > 1:
            raise LossError(
                f"gather_batch in a plan with {self._microbatches} micro-batches, each of which would be compared with its "
                "own rows alone. Leave out accumulate() (pipeline(), reproducible()), and encode the rows in tiles, which "
                "takes as little memory: sl.nn.tiled(encode, rows, n, dim=0)"
            )
        axes = [axis for axis in reversed(self.axes) if self._mesh.shape[axis] > 1]
        if not axes:
            return x
        self._meet()
        dim %= x.dim()
        for axis in axes:
            x = self._along(axis, x, dim)
        return meeting_in_backward(x, self._meet)

    def _along(self, axis: str, x: torch.Tensor, dim: int) -> torch.Tensor:
        ranks, rows = self._mesh.shape[axis], x.shape[dim]
        counts = [rows] * ranks
        if not self._mesh.abstract:
            of_ranks = torch.empty(ranks, dtype=torch.int64, device=x.device)
            own = torch.full((1,), rows, device=x.device)
            with self._mesh.traffic.by_the_loss(), naming("the numbers of rows that ranks gather"):
                primitives.all_gather(self._mesh, axis, of_ranks, own, scalars=True).wait()
            counts = of_ranks.tolist()
        most = max(counts)
        padded = F.pad(x, (0, 0) * (x.dim() - 1 - dim) + (0, most - rows)) if rows < most else x
        whole = pairs.all_gather(padded, axis, dim=dim, mesh=self._mesh)
        if min(counts) == most:
            return whole
        return torch.cat([part.narrow(dim, 0, n) for part, n in zip(whole.chunk(ranks, dim), counts)], dim)
