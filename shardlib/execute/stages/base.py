"""The interface of runners, which run the micro-batches of a step through one stage or many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Protocol

import torch

from shardlib.execute.batches import batch_index, rows_of
from shardlib.execute.gathering import Record
from shardlib.execute.gradients import ReductionOptions
from shardlib.execute.losses import Outcome
from shardlib.execute.refusals import outside
from shardlib.execute.totals import Sums, Totals, Weighing
from shardlib.mesh.mesh import Mesh
from shardlib.nn.functional import Mean
from shardlib.plan.plan import Plan
from shardlib.plan.thinning import Thinned
from shardlib.rng import Key
from shardlib.sharded.tree import Sharded
from shardlib.tree import Tree


@dataclass(frozen=True)
class StepInputs:
    """The inputs of one step.

    Attributes:
        microbatches: the rank's micro-batches.
        keys: each micro-batch's key, or None.
        thinned: what each micro-batch leaves out, or None.
        share: factor by which a scalar loss is multiplied before backward, for the mean over ranks and micro-batches.
        weighing: the weights of a sum of means.
    """

    params: Sharded
    microbatches: Sequence[Tree]
    keys: Sequence[Key | None]
    thinned: Sequence[Thinned | None]
    buffers: Any
    loss_scale: float
    share: float
    weighing: Weighing

    @property
    def tokens(self) -> tuple[int | None, ...]:
        """How many tokens of each sequence the layers see, in their order; nothing where all see all."""
        return () if self.thinned[0] is None else self.thinned[0].tokens

    def named(self, index: int, mesh: Mesh) -> str:
        """A micro-batch of this rank, for messages."""
        count = len(self.microbatches)
        return f"of rank {mesh.rank}" + (f", micro-batch {index + 1} of {count}," if count > 1 else "")

    def seed(self, outcome: Outcome) -> float:
        """The gradient of the total from which backward starts, before the factor of each mean of a sum. The weight of a
        single `Mean` is divided out after backward."""
        return self.loss_scale * (1.0 if outcome.weighted else self.share)


class Runner(Protocol):
    """Runs a function on one plan and mesh.

    Attributes:
        records: the records of its executors.
    """

    @property
    def records(self) -> Sequence[Record]: ...

    def train(self, call: StepInputs, totals: Totals, options: ReductionOptions) -> dict[str, torch.Tensor]:
        """Run forward and backward of all micro-batches: bucket name -> gradient. Outcomes are added to ``totals``."""
        ...

    def shared_aux(self, call: StepInputs, aux: Tree, sums: Sums) -> Tree:
        """The step's ``aux`` on every rank; refuses a loss that does not suit micro-batches of different sizes."""
        ...

    def evaluate(self, params: Sharded, *args: Any) -> Any:
        """The function's result, from a forward without gradients."""
        ...


def keys_of(
    plan: Plan, mesh: Mesh, microbatches: Sequence[Tree], rng: Key | None, first: int | None = None
) -> list[Key | None]:
    """The key of each micro-batch. Its slot is the micro-batch's first row in the global batch over its number of rows.

    Args:
        first: the rank's first row in the global batch; None where all ranks have as many rows.
    """
    if rng is None:
        return [None] * len(microbatches)
    rows = [rows_of(microbatch) for microbatch in microbatches]
    if first is None and len(set(rows)) == 1:
        first = batch_index(plan, mesh) * len(microbatches)
        return [rng.at_slot(first + index) for index in range(len(microbatches))]
    first = batch_index(plan, mesh) * sum(rows) if first is None else first
    starts = [first + sum(rows[:index]) for index in range(len(rows))]
    return [rng.at_slot(Fraction(start, max(count, 1))) for start, count in zip(starts, rows)]


def detached(outcome: Outcome, in_parameters: Callable[[torch.Tensor], bool]) -> Outcome:
    """An outcome that outlives its micro-batch: detached, and outside the memory of parameters."""
    aux = outside(outcome.aux, "aux", in_parameters)
    buffers = outside(outcome.buffers, "buffers", in_parameters)
    means = tuple(Mean(mean.total.detach(), mean.weight) for mean in outcome.means)
    return outcome._replace(means=means, aux=aux, buffers=buffers)
