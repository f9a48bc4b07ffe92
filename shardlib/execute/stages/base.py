"""What runs the micro-batches of a step: one interface, whether they pass through one stage or many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Protocol

import torch

from shardlib.execute.batches import batch_index, rows_of
from shardlib.execute.executor import Executor
from shardlib.execute.gradients import Route
from shardlib.execute.losses import Outcome
from shardlib.execute.record import Record
from shardlib.execute.totals import Sums, Totals
from shardlib.mesh.mesh import Mesh
from shardlib.plan.plan import Plan
from shardlib.rng import Key
from shardlib.sharded.tree import Sharded
from shardlib.tree import Tree


@dataclass(frozen=True)
class Call:
    """What one step is computed from.

    Attributes:
        parts: the rank's micro-batches.
        keys: each one's key, or None.
        share: of a scalar loss in the mean, as far as it is taken before backward.
    """

    params: Sharded
    parts: Sequence[Tree]
    keys: Sequence[Key | None]
    buffers: Any
    loss_scale: float
    share: float

    def seed(self, outcome: Outcome) -> float:
        """What backward starts from: a `Mean`'s weight is known only afterwards, a scalar's beforehand."""
        return self.loss_scale * (1.0 if outcome.weighted else self.share)


class Runner(Protocol):
    """Runs a function on one plan and mesh.

    Attributes:
        records: what its executors know of the runs before.
    """

    @property
    def records(self) -> Sequence[Record]: ...

    def train(self, call: Call, totals: Totals, route: Route) -> dict[str, torch.Tensor]:
        """Forward and backward of all micro-batches: gradients by bucket. What else was found goes to ``totals``."""
        ...

    def shared_aux(self, call: Call, aux: Tree, sums: Sums) -> Tree:
        """The ``aux`` of a step on every rank that took part; refuses losses that the micro-batches do not fit."""
        ...

    def evaluate(self, params: Sharded, *args: Any) -> Any:
        """A forward without gradients: the function's result."""
        ...


def keys_of(plan: Plan, mesh: Mesh, parts: Sequence[Tree], rng: Key | None) -> list[Key | None]:
    """Each micro-batch's key. Its slot is its first row in the global batch, in units of its own rows."""
    if rng is None:
        return [None] * len(parts)
    rows = [rows_of(part) for part in parts]
    if len(set(rows)) == 1:
        first = batch_index(plan, mesh) * len(parts)
        return [rng.at_slot(first + index) for index in range(len(parts))]
    first = batch_index(plan, mesh) * sum(rows)
    starts = [first + sum(rows[:index]) for index in range(len(rows))]
    return [rng.at_slot(Fraction(start, max(count, 1))) for start, count in zip(starts, rows)]


def kept(outcome: Outcome, executor: Executor) -> Outcome:
    """What of an outcome outlives its micro-batch."""
    return outcome._replace(
        total=outcome.total.detach(), aux=executor.outside(outcome.aux), buffers=executor.outside(outcome.buffers)
    )
