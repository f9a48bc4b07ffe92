"""How many rows of the global batch the ranks have: equally many, but in the last batch of a dataset."""

from __future__ import annotations

import hashlib

import torch

from shardlib.collectives.primitives import sum_over
from shardlib.execute.batches import batch_index
from shardlib.mesh.mesh import Mesh
from shardlib.mesh.transport.activity import naming
from shardlib.plan.plan import Plan


class Shares:
    """The first row of a rank's share of the batch, by which keys draw.

    Ranks are taken to have equally many rows, and each adds an integer to a sum that the step makes anyway, which is zero if
    they have: see `shardlib.execute.inputs`. If it is not, they exchange their numbers and take the step again; from then on
    they exchange them before each step, until they are equal.

    Args:
        draws: whether steps draw by keys. If not, nothing is exchanged.
    """

    def __init__(self, plan: Plan, mesh: Mesh, draws: bool) -> None:
        self._plan, self._mesh = plan, mesh
        self._ranks, self._index = plan.batch_ranks if draws else 1, batch_index(plan, mesh)
        self._exchanges = self._ranks > 1  # before the next step

    def first(self, rows: int) -> int | None:
        """The first row of this rank, which has ``rows``; None if all are taken to have as many. Collective."""
        return self.exchanged(rows) if self._exchanges else None

    def number(self, rows: int) -> float:
        """This rank's integer: over all ranks these sum to zero if they have as many rows each, and else to another one."""
        if self._ranks == 1 or self._exchanges:
            return 0.0
        digest = int.from_bytes(hashlib.blake2b(b"%d rows" % rows, digest_size=8).digest(), "little")
        few = digest >> (64 - (50 - self._mesh.size.bit_length()))
        return float(few * (self._ranks * (self._index == 0) - 1))

    @naming("the ranks' numbers of rows")
    def exchanged(self, rows: int) -> int | None:
        """`first`, once the ranks have exchanged their numbers of rows. Collective."""
        if self._ranks == 1:
            return None
        of_ranks = torch.zeros(self._ranks, dtype=torch.float64)
        of_ranks[self._index] = rows
        of_ranks = of_ranks.to(self._mesh.device)
        sum_over(self._mesh, self._plan.batch_axes, of_ranks)
        found = of_ranks.tolist()
        self._exchanges = len(set(found)) > 1
        return round(sum(found[: self._index])) if self._exchanges else None
