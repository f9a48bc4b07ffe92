"""The runner of a pipeline whose stages run as graphs; what cannot be traced runs as it does without."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from shardlib.execute.context import Surroundings
from shardlib.execute.gradients import ReductionOptions
from shardlib.execute.graph.closed import closed_over
from shardlib.execute.graph.forms import Graphs, Trial, form_of
from shardlib.execute.graph.fuse import Inductor
from shardlib.execute.graph.lengths import Lengths
from shardlib.execute.graph.stage import Carry, StageGraph, StageRun, StageSums, shards_of, trace_stage
from shardlib.execute.graph.text import described
from shardlib.execute.losses import Outcome
from shardlib.execute.refusals import storages_of
from shardlib.execute.stages.base import StepInputs
from shardlib.execute.stages.interpreter import Compute, Interpreter, Run, differentiable
from shardlib.execute.stages.pipe import Pipe
from shardlib.execute.totals import Totals
from shardlib.execute.values.around import require_graph
from shardlib.execute.values.function import Function
from shardlib.execute.values.keeping import Between
from shardlib.mesh.mesh import Mesh
from shardlib.nn.blocks import Runner
from shardlib.plan.plan import Plan
from shardlib.rng import Key, seeding_torch
from shardlib.schedules import Action
from shardlib.tree import Tree, tree_map


class GraphPipe(Pipe):
    """A pipeline whose stages run as graphs.

    The first step runs without graphs, as all that is checked of a loss function is in its first run, and shows what passes
    from stage to stage.

    Args:
        without: the names of passes that are left out.
        fuses: whether inductor compiles what stands between exchanges and the library's kernels.

    Raises:
        IllegalComposition: a plan with transforms that a graph does not have; and as for a `Pipe`.
    """

    def __init__(
        self,
        loss_fn: Any,
        plan: Plan,
        mesh: Mesh,
        trained: bool = True,
        with_buffers: bool = False,
        without: Collection[str] = (),
        fuses: bool = False,
    ) -> None:
        require_graph(plan)
        self._inductor = Inductor(mesh.device) if fuses else None
        super().__init__(loss_fn, plan, mesh, trained, with_buffers)
        self._without = without
        self._functions = {number: self._function(number) for number in self._position.stages}
        self._graphs = {number: Graphs[StageGraph](StageGraph.order, not fuses) for number in self._position.stages}
        self._between = {
            number: Between(plan.step.remat, mesh, stage.host) for number, stage in self._position.stages.items()
        }
        self._entering: dict[int, Tree] = {}  # what enters each stage in the first step, without values
        self._trial = Trial(mesh)

    @property
    def graphs(self) -> Mapping[str, torch.fx.Graph]:
        """The graphs traced so far."""
        return {
            f"stage {stage}, {what}, {name}": part.graph
            for stage, graphs in (self._graphs.items() if self._trial.passed else ())
            for name, each in graphs.named()
            for what, part in zip(("forward", "backward", "backward of parameters"), each.parts)
            if part.computes
        }

    def __str__(self) -> str:
        return described(self.graphs, self._trial.passed, self._inductor)

    def _function(self, stage: int, blocks: Callable[[Surroundings], Runner] | None = None) -> Function:
        """A stage as a function of shards, of a carry and of a batch."""
        start, stop = self._plan.stages.spans[stage]

        def run(params: Tree, carry: Tree, batch: Tree, rng: Key | None = None) -> Any:
            return self._blocks.run(params, carry, batch, start, stop, rng)

        return Function(run, self._plan.of_stage(stage), self._mesh, True, blocks)

    def _computing(self, microbatches: Sequence[Tree], keys: Sequence[Key | None]) -> Compute:
        compute = super()._computing(microbatches, keys)

        def noted(stage: int, microbatch: int, tree: Tree, carry: Any) -> Any:
            if not self._trial.ended:
                self._entering.setdefault(stage, tree_map(_like, carry))
            return compute(stage, microbatch, tree, carry)

        return noted

    def train(self, call: StepInputs, totals: Totals, options: ReductionOptions) -> dict[str, torch.Tensor]:
        if self._trial.without_graphs(call):
            gradients = super().train(call, totals, options)
            self._trial.end(call, lambda: self._orders(call), self._home)
            self._entering.clear()
            return gradients
        for graphs in self._graphs.values():
            graphs.begin(call.tokens)
        outcomes: dict[int, Outcome] = {}
        views = {number: self._plan.of_stage(number) for number in self._position.stages}
        position = replace(self._position, stages={number: _GraphStage(view) for number, view in views.items()})
        sums = {number: StageSums(function) for number, function in self._functions.items()}
        with ExitStack() as stack:
            for between in self._between.values():
                stack.enter_context(closing(between))
            _Interpreter(
                partial(self._flight, call, options, outcomes),
                *(position, call.params, None, sums, lambda microbatch: call.seed(outcomes[microbatch])),
            ).run(self._order)
        for index in sorted(outcomes):
            totals.add(outcomes[index])
        return self._summed(each.result() for each in sums.values())

    def _orders(self, call: StepInputs) -> list[Any]:
        """The exchanges of the graphs of the first micro-batch."""
        for number, carry in self._entering.items():
            self._graphs[number].begin(call.tokens)
            self._graph(call, number, 0, carry)
        return [graphs.order for graphs in self._graphs.values()]

    def _graph(
        self, call: StepInputs, stage: int, microbatch: int, carry: Tree
    ) -> tuple[StageGraph, Mapping[Any, Any]]:
        """The graph of a stage for a micro-batch of this form, and what lengths are in it."""
        view, batch, key = self._plan.of_stage(stage), call.microbatches[microbatch], call.keys[microbatch]
        start, stop = self._plan.stages.spans[stage]

        def traced(lengths: Lengths) -> StageGraph:
            return trace_stage(
                partial(self._function, stage),
                shards_of(view, call.params),
                carry,
                batch,
                key,
                call.thinned[microbatch],
                self._position.is_last(stage),
                self._schedule.splits,
                False,
                self._between[stage],
                self._without,
                call.named(microbatch, self._mesh),
                self._inductor,
                lengths,
            )

        read = self._blocks.functions[start:stop]
        return self._graphs[stage].of(lambda: (form_of(carry, batch), key is None, closed_over(read)), traced)

    def _flight(
        self,
        call: StepInputs,
        options: ReductionOptions,
        outcomes: dict[int, Outcome],
        stage: int,
        microbatch: int,
        carry: Tree,
    ) -> StageRun:
        """The flight of a micro-batch through a stage, whose forward it runs."""
        (graph, lengths), key = self._graph(call, stage, microbatch, carry), call.keys[microbatch]
        options.note(graph.reached)
        self.records[0].layer_tokens += graph.layer_tokens
        shards = shards_of(self._plan.of_stage(stage), call.params)
        flight = graph.flight(list(shards.values()), key, (carry, call.microbatches[microbatch]), lengths)
        with seeding_torch(key and key.fold_in(stage), self._mesh.device):
            results = flight.part(0)
        if isinstance(graph.form, Carry):
            flight.result = graph.form.of(results)
        else:
            outcome, _ = graph.form.outcome(results, storages_of(call.params))
            outcomes[microbatch] = outcome
            flight.result = outcome.total.detach().requires_grad_()
        return flight


class _GraphStage:
    """One of this rank's stages, as an `Interpreter` runs it.

    Attributes:
        runs: micro-batch -> its run.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.runs: dict[int, Run] = {}

    def begin(self, microbatch: int) -> Run:
        self.runs[microbatch] = Run(None)
        return self.runs[microbatch]

    def end(self, microbatch: int) -> None:
        run = self.runs.pop(microbatch)
        if run.executor is not None:
            run.executor.close()


class _Interpreter(Interpreter):
    """An interpreter of actions that are graphs."""

    def __init__(self, flight: Callable[[int, int, Tree], StageRun], *args: Any) -> None:
        super().__init__(*args)
        self._flight = flight

    def _result(self, action: Action, run: Run, arrived: Any) -> Any:
        run.executor = flight = self._flight(action.stage, action.microbatch, arrived)
        result, flight.result = flight.result, None
        run.inputs = [leaf.new_zeros(()).expand(leaf.shape) for leaf in differentiable(arrived)]  # without memory
        run.outputs = differentiable(result)
        return result

    def _whole(self, action: Action, run: Run) -> list[torch.Tensor]:
        return run.executor.differentiate(run.seeds, self._gradients[action.stage])

    def _first_half(self, run: Run) -> list[torch.Tensor]:
        return run.executor.inputs_gradient(run.seeds)

    def _second_half(self, action: Action, run: Run) -> None:
        run.executor.weights_gradient(self._gradients[action.stage])


def _like(leaf: Any) -> Any:
    """A tensor as another one, without its values."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    made = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)
    return made.requires_grad_(leaf.requires_grad)
