"""The runner of a step as one graph for each form of batch; what cannot be traced runs as it does without a graph."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from shardlib.common._compat import storage_id
from shardlib.execute.gradients import ReductionOptions
from shardlib.execute.graph.alive import order_of
from shardlib.execute.graph.closed import closed_over
from shardlib.execute.graph.forms import Graphs, agreed, form_of, require_no_reached
from shardlib.execute.graph.passes import optimised
from shardlib.execute.graph.text import described
from shardlib.execute.graph.trace import Traced, trace
from shardlib.execute.losses import Outcome
from shardlib.execute.opaque import storages_of
from shardlib.execute.record import Record
from shardlib.execute.stages.base import Call, detached
from shardlib.execute.stages.one import OneStage
from shardlib.execute.totals import Totals
from shardlib.execute.values.function import Function
from shardlib.execute.values.refusals import require_graph
from shardlib.mesh.mesh import Mesh
from shardlib.plan.plan import Plan
from shardlib.rng import seeding_torch
from shardlib.tree import flatten


class GraphStage:
    """Runs a loss function on a plan with one stage, as graphs.

    The first step runs without a graph, as all that is checked of a loss function is in its first run.

    Args:
        without: the names of passes that are left out.

    Raises:
        IllegalComposition: a plan with transforms that a graph does not have.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        plan: Plan,
        mesh: Mesh,
        trained: bool = True,
        with_buffers: bool = False,
        without: Collection[str] = (),
    ) -> None:
        require_graph(plan)
        self._fn, self._plan, self._mesh, self._with_buffers, self._without = fn, plan, mesh, with_buffers, without
        self._function = Function(fn, plan, mesh, trained)
        self._eager = OneStage(fn, plan, mesh, trained, with_buffers)  # the first step, and what cannot be traced
        self._graphs = Graphs[Traced](lambda traced: order_of(traced.module.graph))
        self._first: Sequence[Any] | None = None  # the micro-batches of the first step, which may be taken again
        self._traceable = True

    @property
    def records(self) -> Sequence[Record]:
        return self._eager.records

    @property
    def graphs(self) -> Mapping[str, torch.fx.Graph]:
        """The graphs traced so far."""
        made = self._graphs.made if self._traceable else ()
        return {f"form {number}": traced.module.graph for number, traced in enumerate(made, 1)}

    def __str__(self) -> str:
        return described(self.graphs, self._traceable)

    def train(self, call: Call, totals: Totals, options: ReductionOptions) -> dict[str, torch.Tensor]:
        if self._traceable:
            require_no_reached(options)
        if not self._traceable or self._first is None or self._first is call.microbatches:
            gradients = self._eager.train(call, totals, options)
            if self._first is None:
                self._first = call.microbatches
                self._traceable = agreed(self._mesh, lambda: self._order(call))
            return gradients
        self._first = ()
        self._graphs.begin()
        sums = self._function.sums() if len(call.microbatches) > 1 else {}
        for index in range(len(call.microbatches)):
            outcome, gradients = self._microbatch(call, index, totals.buffers if index else call.buffers, sums)
            totals.add(outcome)
        return self._function.reduced(sums) if sums else gradients

    def shared_aux(self, call: Call, aux: Any, sums: Any) -> Any:
        return aux

    def evaluate(self, params: Any, *args: Any) -> Any:
        return self._eager.evaluate(params, *args)

    def _microbatch(
        self, call: Call, index: int, buffers: Any, sums: Mapping[str, torch.Tensor]
    ) -> tuple[Outcome, dict[str, torch.Tensor]]:
        """The outcome of a micro-batch, and its gradients, if they are not added to sums over several."""
        batch, key = call.microbatches[index], call.keys[index]
        traced = self._traced(call, index, buffers)
        stored = [call.params.buffers[bucket.name] for bucket in self._plan.buckets]
        start = call.loss_scale * (1.0 if traced.form.weighted else call.share)
        seed = torch.full((), start, dtype=torch.float64, device=self._mesh.device)
        tensors = [leaf for leaf in (*flatten(batch)[1], *flatten(buffers)[1]) if isinstance(leaf, torch.Tensor)]
        draws = [] if key is None else traced.stands.values(key)
        with torch.no_grad(), seeding_torch(key, self._mesh.device):
            outputs = traced.module(*stored, *tensors, seed, *draws, *sums.values())
        means, aux, after, gradients = traced.form.results(outputs)
        outcome = Outcome(means, traced.form.weighted, aux, after)
        names = [bucket.name for bucket in self._plan.trained]
        held = storages_of(call.params)
        outcome = detached(outcome, lambda tensor: storage_id(tensor.untyped_storage()) in held)
        return outcome, {} if sums else dict(zip(names, gradients, strict=True))

    def _order(self, call: Call) -> list[Any] | None:
        """The exchanges of the graph of the first micro-batch."""
        self._traced(call, 0, call.buffers)
        return self._graphs.order

    def _traced(self, call: Call, index: int, buffers: Any) -> Traced:
        """The graph of a micro-batch of this form."""
        plan, mesh, batch, key = self._plan, self._mesh, call.microbatches[index], call.keys[index]
        alone = len(call.microbatches) == 1

        def traced() -> Traced:
            found = trace(
                lambda blocks: Function(self._fn, plan, mesh, True, blocks),
                {bucket.name: call.params.buffers[bucket.name] for bucket in plan.buckets},
                batch,
                buffers if self._with_buffers else None,
                key,
                alone,
                call.named(index, mesh),
                mesh.device,
            )
            return optimised(found, plan.step.remat, self._without, 0 if alone else len(plan.trained))

        return self._graphs.of(lambda: (form_of(batch), form_of(buffers), key is None, closed_over(self._fn)), traced)
