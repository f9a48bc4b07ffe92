"""The runner of a step as a function of values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardlib.common._compat import storage_id
from shardlib.errors import IllegalComposition
from shardlib.execute.gradients import ReductionOptions
from shardlib.execute.losses import Outcome, require_gradient
from shardlib.execute.opaque import outside
from shardlib.execute.record import Record
from shardlib.execute.stages.base import Call
from shardlib.execute.totals import Sums, Totals
from shardlib.execute.values.function import Buffers, Function, gradients_of
from shardlib.execute.values.refusals import require_values
from shardlib.execute.values.remat import recomputed
from shardlib.mesh.mesh import Mesh
from shardlib.nn.functional import Mean
from shardlib.plan.plan import Plan
from shardlib.rng import seeding_torch
from shardlib.tree import Tree


class ValueStage:
    """Runs a loss function on a plan with one stage, as a function from shards to gradients of shards.

    All units are gathered before the loss, by every rank, in the plan's order.

    Raises:
        IllegalComposition: a plan with transforms that functions of values do not have.
    """

    records: Sequence[Record] = ()  # ranks cannot differ in what they gather

    def __init__(
        self, fn: Callable[..., Any], plan: Plan, mesh: Mesh, trained: bool = True, with_buffers: bool = False
    ) -> None:
        require_values(plan, "a step as a function of values", "take the step without")
        self.plan, self.mesh, self._with_buffers = plan, mesh, with_buffers
        self.function = Function(fn, plan, mesh, trained, recomputed(plan) if trained else None)

    def train(self, call: Call, totals: Totals, options: ReductionOptions) -> dict[str, torch.Tensor]:
        if options.reached is not None:
            raise IllegalComposition(
                "a step as a function of values does not tell which parameters were used: leave out optim.skip_unused"
            )
        held: dict[str, torch.Tensor] = {}
        for index in range(len(call.microbatches)):
            outcome, gradients = self.microbatch(call, index, totals.buffers if index else call.buffers)
            held = {name: held[name].add_(new) if held else new for name, new in gradients.items()}
            totals.add(outcome)
        return self.function.reduced(held)

    def microbatch(self, call: Call, index: int, buffers: Any) -> tuple[Outcome, dict[str, torch.Tensor]]:
        """The outcome and the gradients of one micro-batch, in the layout in which they are accumulated."""
        stored = call.params.buffers
        slots = {name: slot.requires_grad_() for name, slot in self.function.slots().items()}
        key, given = call.keys[index], buffers if self._with_buffers else None
        with torch.enable_grad(), seeding_torch(key, self.mesh.device):
            outcome = self.function.outcome(stored, slots, call.microbatches[index], key, given)
        require_gradient(outcome, None, call.named(index, self.mesh))
        if len(call.microbatches) == 1:
            call.weighing.meet(outcome)
        if not call.weighing.knows(outcome):  # the step is taken again
            seeds: Sequence[torch.Tensor] = ()
        else:
            seeds = (call.seed(outcome) * call.weighing.factors(outcome)).unbind()
        gradients = gradients_of([mean.total for mean in outcome.means], seeds, slots)
        return detached(outcome, stored), gradients

    def shared_aux(self, call: Call, aux: Tree, sums: Sums) -> Tree:
        return aux

    def evaluate(self, params: Any, *args: Any) -> Any:
        with torch.no_grad():
            return outside(self.function(params.buffers, {}, *args), "the result", lambda tensor: True)


def detached(outcome: Outcome, stored: Buffers) -> Outcome:
    """An outcome that outlives its micro-batch: detached, and outside the memory of parameters."""
    memory = {storage_id(buffer.untyped_storage()) for buffer in stored.values()}

    def in_parameters(tensor: torch.Tensor) -> bool:
        return storage_id(tensor.untyped_storage()) in memory

    aux, buffers = outside(outcome.aux, "aux", in_parameters), outside(outcome.buffers, "buffers", in_parameters)
    means = tuple(Mean(mean.total.detach(), mean.weight) for mean in outcome.means)
    return outcome._replace(means=means, aux=aux, buffers=buffers)
