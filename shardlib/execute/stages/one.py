"""The runner of one stage: micro-batches one after the other, each forward and then backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardlib.common._compat import is_compiled
from shardlib.errors import HandleError
from shardlib.execute.executor import Executor
from shardlib.execute.gathering import Record
from shardlib.execute.gradients import Gradients, ReductionOptions, Turn
from shardlib.execute.losses import Outcome, read_loss, require_gradient, wants
from shardlib.execute.sequence import require_whole_loss
from shardlib.execute.stages.base import StepInputs, detached
from shardlib.execute.totals import Sums, Totals
from shardlib.mesh.mesh import Mesh
from shardlib.plan.plan import Plan
from shardlib.rng import seeding_torch
from shardlib.sharded.tree import Sharded
from shardlib.tree import Tree


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
        self.executor = Executor(plan, mesh, trained)
        if trained and is_compiled(fn):
            _refuse_compiled(self.executor, plan)

    @property
    def records(self) -> Sequence[Record]:
        return [self.executor.record]

    def train(self, call: StepInputs, totals: Totals, options: ReductionOptions) -> dict[str, torch.Tensor]:
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
        batch, key = call.microbatches[index], call.keys[index]
        extra: dict[str, Any] = {"rng": key} if self._wants_rng and key is not None else {}

        def run(tree: Tree) -> tuple[list[torch.Tensor], Outcome]:
            inputs = (tree, buffers, batch) if self._with_buffers else (tree, batch)
            with seeding_torch(key, self._mesh.device):
                outcome = read_loss(self._fn(*inputs, **extra), self._with_buffers)
            require_gradient(outcome, call.thinned[index], call.named(index, self._mesh))
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
        return self.executor.backward(call.params, gradients, turn, run, seeds, call.thinned[index])

    def shared_aux(self, call: StepInputs, aux: Tree, sums: Sums) -> Tree:
        return aux

    def evaluate(self, params: Sharded, *args: Any) -> Any:
        return self.executor.forward(params, lambda tree: self._fn(tree, *args))


def _refuse_compiled(executor: Executor, plan: Plan) -> None:
    if not (executor.gathers or plan.styles):
        return
    what = "ZeRO stage 3 gathers parameters" if executor.gathers else "tensor slicing sends messages"
    raise HandleError(
        f"the loss function is compiled as a whole, and {what} inside of it. Give it as it is, with "
        "make_train_step(..., compile='inductor'), which compiles what stands in between"
    )
