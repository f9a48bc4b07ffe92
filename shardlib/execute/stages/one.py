"""The micro-batches of a step, and the runner of one stage, which takes them one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch

from shardlib.common._compat import is_compiled
from shardlib.errors import HandleError
from shardlib.execute.batches import batch_index, own_containers, rows_of
from shardlib.execute.collective_order import Record
from shardlib.execute.executor import Executor
from shardlib.execute.gradients import Gradients, ReductionOptions, Turn
from shardlib.execute.losses import Outcome, read_loss, require_gradient, wants
from shardlib.execute.refusals import outside
from shardlib.execute.sequence import require_whole_loss
from shardlib.execute.totals import Sums, Totals, Weighing
from shardlib.mesh.mesh import Mesh
from shardlib.nn.functional import Mean
from shardlib.plan.drops import DropPlan
from shardlib.plan.plan import Plan
from shardlib.rng import Key, seeding_torch
from shardlib.sharded.tree import Sharded
from shardlib.tree import Tree


@dataclass(frozen=True)
class StepInputs:
    """The inputs of one step.

    Attributes:
        microbatches: the rank's micro-batches.
        keys: each micro-batch's key, or None.
        drops: what each micro-batch leaves out, or None.
        share: factor by which a scalar loss is multiplied before backward, for the mean over ranks and micro-batches.
        weighing: the weights of a sum of means.
    """

    params: Sharded
    microbatches: Sequence[Tree]
    keys: Sequence[Key | None]
    drops: Sequence[DropPlan | None]
    buffers: Any
    loss_scale: float
    share: float
    weighing: Weighing

    @property
    def tokens(self) -> tuple[int | None, ...]:
        """How many tokens of each sequence the layers see, in their order; nothing where all see all."""
        return () if self.drops[0] is None else self.drops[0].tokens

    def named(self, index: int, mesh: Mesh) -> str:
        """A micro-batch of this rank, for messages."""
        count = len(self.microbatches)
        return f"of rank {mesh.rank}" + (f", micro-batch {index + 1} of {count}," if count > 1 else "")

    def seed(self, outcome: Outcome) -> float:
        """The gradient of the total from which backward starts, before the factor of each mean of a sum. The weight of a
        single `Mean` is divided out after backward."""
        return self.loss_scale * (1.0 if outcome.weighted else self.share)


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


class OneStage:
    """Runs any function on a plan with one stage.

    Args:
        trained: whether the function is a loss function to be differentiated.
        with_buffers: whether the function takes and returns buffers.

    Raises:
        HandleError: a compiled loss function with a plan that gathers or slices parameters.
    """

    def __init__(
        self, fn: Callable[..., Any], plan: Plan, mesh: Mesh, trained: bool, with_buffers: bool = False
    ) -> None:
        self._fn, self._plan, self._mesh, self._with_buffers = fn, plan, mesh, with_buffers
        self._wants_rng = wants(fn, "rng")
        self.executor: Executor = Executor(plan, mesh, trained)
        self.records: list[Record] = [self.executor.record]
        if trained and is_compiled(fn) and (self.executor.gathers or plan.styles):
            what = "ZeRO stage 3 gathers parameters" if self.executor.gathers else "tensor slicing sends messages"
            raise HandleError(
                f"the loss is compiled as a whole, and {what} in it. Use make_train_step(compile='inductor')"
            )

    def train(self, call: StepInputs, totals: Totals, options: ReductionOptions) -> dict[str, torch.Tensor]:
        """Run forward and backward of all micro-batches: bucket name -> gradient. Outcomes are added to ``totals``."""
        gradients = self.executor.gradients(options)
        buffers = call.buffers
        for index in range(len(call.microbatches)):
            outcome = self.microbatch(call, index, buffers, gradients)
            if outcome is not None:
                buffers = outcome.buffers
                totals.add(outcome)
        return gradients.result()

    def microbatch(self, call: StepInputs, index: int, buffers: Any, gradients: Gradients) -> Outcome | None:
        """Run forward and backward of one micro-batch; None if the step will be repeated."""
        key = call.keys[index]
        extra: dict[str, Any] = {"rng": key} if self._wants_rng and key is not None else {}

        def run(tree: Tree) -> tuple[list[torch.Tensor], Outcome]:
            batch = own_containers(call.microbatches[index])
            inputs = (tree, buffers, batch) if self._with_buffers else (tree, batch)
            with seeding_torch(key, self._mesh.device):
                outcome = read_loss(self._fn(*inputs, **extra), self._with_buffers)
            require_gradient(outcome, call.drops[index], call.named(index, self._mesh))
            record, sequence = self.executor.record, self._plan.step.sequence
            if sequence and record.order is None:
                require_whole_loss(sequence, self._mesh, record.done, outcome.means)
            return [mean.total for mean in outcome.means], detached(outcome, self.executor.in_parameters)

        def seeds(outcome: Outcome | None) -> Sequence[torch.Tensor]:
            weighing = call.weighing
            if len(call.microbatches) == 1:
                weighing.meet(outcome)
            # Without weights the step is taken again. Ranks that gather run its backward too, to keep to their trace.
            if outcome is None or not (weighing.knows(outcome) or self.executor.gathers):
                return ()
            if len(outcome.means) == 1:
                return (torch.full((), call.seed(outcome), dtype=torch.float64, device=self._mesh.device),)
            return (call.seed(outcome) * weighing.factors(outcome)).unbind()

        turn = Turn(index, index == len(call.microbatches) - 1)
        return self.executor.backward(call.params, gradients, turn, run, seeds, call.drops[index])

    def shared_aux(self, call: StepInputs, aux: Tree, sums: Sums) -> Tree:
        """The step's ``aux`` on every rank."""
        return aux

    def evaluate(self, params: Sharded, *args: Any) -> Any:
        """The function's result, from a forward without gradients."""
        return self.executor.forward(params, lambda tree: self._fn(tree, *own_containers(args)))
