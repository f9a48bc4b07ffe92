"""The runners of steps as graphs, one for each form of batch; what cannot be traced runs as it does without a graph."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Any

import torch

from shardlib.execute.gradients import ReductionOptions
from shardlib.execute.graph.analysis import described, order_of
from shardlib.execute.graph.closed import closed_over
from shardlib.execute.graph.forms import Graphs, Trial, form_of, told
from shardlib.execute.graph.fuse import Inductor
from shardlib.execute.graph.passes import GraphOptions, optimise
from shardlib.execute.graph.recorder import Lengths
from shardlib.execute.graph.stage import GraphedStage, GraphRun, micro_batch, note, shards_of
from shardlib.execute.graph.sums import GradientSums, Land, StageSums
from shardlib.execute.graph.trace import Traced, trace
from shardlib.execute.losses import Outcome
from shardlib.execute.refusals import storages_of
from shardlib.execute.stages.interpreter import Interpreter
from shardlib.execute.stages.one import OneStage, StepInputs
from shardlib.execute.stages.pipe import Pipe
from shardlib.execute.totals import Totals
from shardlib.execute.values.around import require_graph
from shardlib.execute.values.keeping import Between
from shardlib.mesh.mesh import Mesh
from shardlib.plan.plan import Plan
from shardlib.rng import Key, seeding_torch
from shardlib.tree import Tree, tensors_of, tree_map


class GraphStage(OneStage):
    """Runs a loss function on a plan with one stage, as graphs.

    The first step runs without a graph, as all that is checked of a loss function is in its first run.

    Args:
        without: the names of passes that are left out.
        fuses: whether inductor compiles what stands between exchanges and the library's kernels.

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
        fuses: bool = False,
    ) -> None:
        require_graph(plan)
        super().__init__(fn, plan, mesh, trained, with_buffers)
        self._options = GraphOptions(without, Inductor(mesh.device) if fuses else None)
        self._between = Between(plan.step.remat, mesh, self.executor.host)
        # Of a sum of means forward and backward are graphs of their own.
        self._halves = GraphedStage(fn, fn, plan, mesh, None, True, self._between, self._options)
        self._function = self._halves.function
        self._graphs = Graphs[Traced](lambda traced: order_of(traced.graph), not fuses)
        self._terms = 1  # means in the loss
        self._trial = Trial(mesh)

    @property
    def graphs(self) -> Mapping[str, torch.fx.Graph]:
        """The graphs traced so far."""
        if not self._trial.passed:
            return {}
        return {name: traced.graph for name, traced in self._graphs.named()} | self._halves.named()

    def __str__(self) -> str:
        return described(self.graphs, self._trial.passed, self._options.inductor)

    def train(self, call: StepInputs, totals: Totals, options: ReductionOptions) -> dict[str, torch.Tensor]:
        if self._trial.without_graphs(call):
            held = super().train(call, totals, options)
            self._terms = len(totals.losses) // len(call.microbatches)
            self._trial.end(call, lambda: self._order(call, self._kept(options)))
            return held
        try:
            return self._train_graphs(call, totals, options)
        except Exception as error:
            if error not in (self._graphs.failed, self._halves.graphs.failed):
                raise
            if totals.losses or self._mesh.size > 1:  # the other ranks run graphs, whose exchanges these would not be
                error.add_note(f"compile=True: no graph for a batch of another form than the first ({told(error)})")
                raise
            held = super().train(call, totals, options)  # or an error of the user's own is raised again
            self._trial.stop(error)
            return held

    def _train_graphs(self, call: StepInputs, totals: Totals, options: ReductionOptions) -> dict[str, torch.Tensor]:
        self._begin(call)
        if self._halved:
            return self._train_in_halves(call, totals, options)
        sums = self._function.sums() if self._adds(call) else {}
        tiles = self._function.in_tiles(sums)
        gradients, kept = GradientSums(self._plan, self._mesh, options.landing), self._kept(options)
        for index in range(len(call.microbatches)):
            buffers = totals.buffers if index else call.buffers
            outcome, new, kept = self._microbatch(call, index, buffers, kept, gradients.land, tiles, options)
            gradients.add(index, new)
            totals.add(outcome)
        held = gradients.sums() | tiles
        if not self._reduces(call):
            held = self._function.reduced(held, kept, options.unreduced)
        options.residuals.after |= kept
        return self._function.joined(held, sums)

    def _begin(self, call: StepInputs) -> None:
        self._graphs.begin(call.tokens)
        self._halves.graphs.begin(call.tokens)

    @property
    def _halved(self) -> bool:
        """Whether ranks sum the weights of several means between forward and backward."""
        plan, moves = self._plan, any(set(bucket.memory) != {"device"} for bucket in self._plan.buckets)
        plain = not (plan.channels or plan.reductions.owner or plan.step.tree or moves or self._with_buffers)
        return self._terms > 1 and plain

    def _train_in_halves(self, call: StepInputs, totals: Totals, options: ReductionOptions) -> dict[str, torch.Tensor]:
        sums = StageSums(self._function)
        with closing(self._between):
            for index in range(len(call.microbatches)):
                run = GraphRun(self._halves, call, index, sums, options, self.records[0])
                run.forward(None)
                outcome = run.outcome
                if len(call.microbatches) == 1:
                    call.weighing.meet(outcome)
                seeds = (call.seed(outcome) * call.weighing.factors(outcome)).unbind()
                run.backward([seed.to(mean.total.dtype) for seed, mean in zip(seeds, outcome.means)])
                totals.add(outcome)
        return sums.result()

    def _reduces(self, call: StepInputs) -> bool:
        """Whether a graph sums gradients over ranks as the optimizer holds them: not where an optimizer sums over an axis
        itself, in some steps alone, or ranks send nodes of a tree."""
        plan = self._plan
        return len(call.microbatches) == 1 and plan.reductions.owner is None and not plan.step.tree

    def _adds(self, call: StepInputs) -> bool:
        """Whether a graph adds gradients to sums over micro-batches."""
        plan = self._plan
        return len(call.microbatches) > 1 and not plan.step.tree and not any(map(plan.lands_each, plan.trained))

    def _kept(self, options: ReductionOptions) -> dict[str, torch.Tensor]:
        """What codecs keep, by name."""
        return {name: options.residuals.after[name] for channel in self._plan.channels for name in channel.keeps}

    def _microbatch(
        self,
        call: StepInputs,
        index: int,
        buffers: Any,
        kept: dict[str, torch.Tensor],
        land: Land,
        sums: Mapping[str, torch.Tensor],
        options: ReductionOptions,
    ) -> tuple[Outcome, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """The outcome of a micro-batch, its gradients if they are not added to ``sums``, and what codecs keep then."""
        key, trees = call.keys[index], self._trees(call, index, buffers)
        traced, lengths = self._traced(call, index, trees, kept)
        note(traced, options, self.records[0])
        stored = shards_of(self._plan, call.params).values()
        start = call.loss_scale * (1.0 if traced.form.weighted else call.share)
        seed = torch.full((), start, dtype=torch.float64, device=self._mesh.device)
        draws = [] if key is None else traced.stands.values(key, lengths)
        with torch.no_grad(), seeding_torch(key, self._mesh.device), closing(self._between):
            outputs = traced.module(*stored, *tensors_of(trees), *kept.values(), seed, *draws, land, *sums.values())
        outcome, rest = traced.form.outcome(outputs, storages_of(call.params))
        names = [] if sums else [bucket.name for bucket in self._plan.tiled.trained]
        results = dict(zip((*names, *kept), rest, strict=True))
        return outcome, {name: results[name] for name in names}, {name: results[name] for name in kept}

    def _trees(self, call: StepInputs, index: int, buffers: Any) -> Sequence[Tree]:
        """What the loss is given besides parameters."""
        batch = call.microbatches[index]
        return (buffers, batch) if self._with_buffers else (batch,)

    def _order(self, call: StepInputs, kept: dict[str, torch.Tensor]) -> list[Any] | None:
        """The exchanges of the graph of the first micro-batch."""
        self._begin(call)
        if self._halved:
            self._halves.graph(call, 0, (call.microbatches[0],))
            return self._halves.graphs.order
        self._traced(call, 0, self._trees(call, 0, call.buffers), kept)
        return self._graphs.order

    def _traced(
        self, call: StepInputs, index: int, trees: Sequence[Tree], kept: dict[str, torch.Tensor]
    ) -> tuple[Traced, Mapping[Any, Any]]:
        """The graph of a micro-batch of this form, and what lengths are in it."""
        plan, mesh, reduces, key = self._plan, self._mesh, self._reduces(call), call.keys[index]

        def traced(lengths: Lengths) -> Traced:
            of = micro_batch(self._fn, self._fn, plan, mesh, call, index, trees, lengths)
            found = trace(of, kept, self._with_buffers, reduces, mesh.device)
            lands = [
                tile.name if leaves and (reduces or plan.lands_each(bucket)) else None
                for bucket in plan.trained
                for leaves in [bucket.memory.optimizer != "device" or bucket.tiles > 1]
                for tile in bucket.cut
            ]
            summed = len(plan.tiled.trained) if self._adds(call) else 0
            optimise(found, self._between, self._options, lands, summed)
            return found

        return self._graphs.of(lambda: (form_of(*trees), key is None, closed_over(self._fn, trees)), traced)


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
        super().__init__(loss_fn, plan, mesh, trained, with_buffers)
        self._options = GraphOptions(without, Inductor(mesh.device) if fuses else None)
        self._graphed = {number: self._graphed_stage(number) for number in self._stages}
        self._entering: dict[int, Tree] = {}  # what enters each stage in the first step, without values
        self._trial = Trial(mesh)

    def _graphed_stage(self, number: int) -> GraphedStage:
        start, stop = self._plan.stages.spans[number]

        def run(params: Tree, carry: Tree, batch: Tree, rng: Key | None = None) -> Any:
            return self._blocks.run(params, carry, batch, start, stop, rng)

        stage, reads = self._stages[number], self._blocks.functions[start:stop]
        between = Between(self._plan.step.remat, self._mesh, stage.host)
        last = self._position.is_last(number)
        return GraphedStage(run, reads, stage.plan, self._mesh, number, last, between, self._options)

    @property
    def graphs(self) -> Mapping[str, torch.fx.Graph]:
        """The graphs traced so far."""
        if not self._trial.passed:
            return {}
        stages = self._graphed.items()
        return {f"stage {number}, {name}": graph for number, stage in stages for name, graph in stage.named().items()}

    def __str__(self) -> str:
        return described(self.graphs, self._trial.passed, self._options.inductor)

    def _computed(self, stage: int, tree: Tree, carry: Any, batch: Tree, key: Key | None) -> Any:
        if not self._trial.ended:
            self._entering.setdefault(stage, tree_map(_without_values, carry))
        return super()._computed(stage, tree, carry, batch, key)

    def train(self, call: StepInputs, totals: Totals, options: ReductionOptions) -> dict[str, torch.Tensor]:
        if self._trial.without_graphs(call):
            gradients = super().train(call, totals, options)
            self._trial.end(call, lambda: self._orders(call), self._home)
            self._entering.clear()
            return gradients
        sums = {number: StageSums(stage.function) for number, stage in self._graphed.items()}
        losses: dict[int, GraphRun] = {}  # of the last stage

        def begin(stage: int, microbatch: int) -> GraphRun:
            run = GraphRun(self._graphed[stage], call, microbatch, sums[stage], options, self.records[0])
            return losses.setdefault(microbatch, run) if self._position.is_last(stage) else run

        with ExitStack() as stack:
            for stage in self._graphed.values():
                stage.graphs.begin(call.tokens)
                stack.enter_context(closing(stage.between))
            Interpreter(self._position, begin, lambda index: call.seed(losses[index].outcome)).run(self._order)
        for index in sorted(losses):
            totals.add(losses[index].outcome)
        return self._summed(each.result() for each in sums.values())

    def _orders(self, call: StepInputs) -> list[Any]:
        """The exchanges of the graphs of the first micro-batch."""
        for number, carry in self._entering.items():
            self._graphed[number].graphs.begin(call.tokens)
            self._graphed[number].graph(call, 0, (carry, call.microbatches[0]))
        return [stage.graphs.order for stage in self._graphed.values()]


def _without_values(leaf: Any) -> Any:
    """A tensor as another one, without its values."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    made = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)
    return made.requires_grad_(leaf.requires_grad)
