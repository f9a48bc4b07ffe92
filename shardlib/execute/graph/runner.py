"""The runner of a step as one graph for each form of batch; what cannot be traced runs as it does without a graph."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from typing import Any

import torch

from shardlib.collectives.tree_sum import Node, TreeSum, joined
from shardlib.execute.batches import batch_index
from shardlib.execute.gathering import Record
from shardlib.execute.gradients import ReductionOptions
from shardlib.execute.graph.alive import order_of
from shardlib.execute.graph.closed import closed_over
from shardlib.execute.graph.forms import Graphs, Trial, form_of
from shardlib.execute.graph.fuse import Inductor
from shardlib.execute.graph.land import Land
from shardlib.execute.graph.lengths import Lengths
from shardlib.execute.graph.passes import optimise
from shardlib.execute.graph.stage import StageGraph, StageSums, shards_of, trace_stage
from shardlib.execute.graph.text import described
from shardlib.execute.graph.trace import Form, Traced, tensors_of, trace
from shardlib.execute.losses import Outcome, wants
from shardlib.execute.refusals import storages_of
from shardlib.execute.stages.base import StepInputs
from shardlib.execute.stages.one import OneStage
from shardlib.execute.totals import Totals
from shardlib.execute.values.around import require_graph
from shardlib.execute.values.function import Function
from shardlib.execute.values.keeping import Between
from shardlib.mesh.mesh import Mesh
from shardlib.plan.buckets import Bucket
from shardlib.plan.plan import Plan
from shardlib.rng import seeding_torch
from shardlib.sharded.landing import Landing
from shardlib.sharded.on_disk import BufferOnDisk


class GraphStage:
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
        self._inductor = Inductor(mesh.device) if fuses else None
        self._fn, self._plan, self._mesh, self._with_buffers, self._without = fn, plan, mesh, with_buffers, without
        self._function = Function(fn, plan, mesh, trained)
        self._eager = OneStage(fn, plan, mesh, trained, with_buffers)  # the first step, and what cannot be traced
        self._between = Between(plan.step.remat, mesh, self._eager.executor.host)
        self._graphs = Graphs[Traced](lambda traced: order_of(traced.graph), not fuses)
        self._halves = Graphs[StageGraph](StageGraph.order, not fuses)  # of a sum of means: forward, and backward
        self._terms = 1  # means in the loss
        self._trial = Trial(mesh)

    @property
    def records(self) -> Sequence[Record]:
        return self._eager.records

    @property
    def graphs(self) -> Mapping[str, torch.fx.Graph]:
        """The graphs traced so far."""
        if not self._trial.passed:
            return {}
        parts = ("forward", "backward")
        halves = {
            f"{part}, {n}": each.graph for n, graph in self._halves.named() for part, each in zip(parts, graph.parts)
        }
        return {name: traced.graph for name, traced in self._graphs.named()} | halves

    def __str__(self) -> str:
        return described(self.graphs, self._trial.passed, self._inductor)

    def train(self, call: StepInputs, totals: Totals, options: ReductionOptions) -> dict[str, torch.Tensor]:
        if self._trial.without_graphs(call):
            held = self._eager.train(call, totals, options)
            self._terms = len(totals.losses) // len(call.microbatches)
            self._trial.end(call, lambda: self._order(call, self._kept(options)))
            return held
        self._begin(call)
        if self._halved:
            stage = StageSums(self._function)
            with closing(self._between):
                for index in range(len(call.microbatches)):
                    totals.add(self._in_halves(call, index, stage, options))
            return stage.result()
        sums = self._function.sums() if self._adds(call) else {}
        tiles = self._function.in_tiles(sums)
        gradients, kept = _Gradients(self._plan, self._mesh, options.landing), self._kept(options)
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

    def shared_aux(self, call: StepInputs, aux: Any, sums: Any) -> Any:
        return aux

    def evaluate(self, params: Any, *args: Any) -> Any:
        return self._eager.evaluate(params, *args)

    def _begin(self, call: StepInputs) -> None:
        self._graphs.begin(call.tokens)
        self._halves.begin(call.tokens)

    def _note(self, graph: Traced | StageGraph, options: ReductionOptions) -> None:
        """Note what a micro-batch of a graph uses."""
        options.note(graph.reached)
        self.records[0].layer_tokens += graph.layer_tokens

    @property
    def _halved(self) -> bool:
        """Whether forward and backward are graphs of their own, as ranks sum the weights of several means in between."""
        plan, moves = self._plan, any(set(bucket.memory) != {"device"} for bucket in self._plan.buckets)
        plain = not (plan.channels or plan.reductions.owner or plan.step.tree or moves or self._with_buffers)
        return self._terms > 1 and plain

    def _in_halves(self, call: StepInputs, index: int, sums: StageSums, options: ReductionOptions) -> Outcome:
        """The outcome of a micro-batch, whose gradients are added to ``sums``."""
        (graph, lengths), key = self._half(call, index), call.keys[index]
        self._note(graph, options)
        shards = shards_of(self._plan, call.params)
        flight = graph.flight(list(shards.values()), key, call.microbatches[index], lengths)
        with seeding_torch(key, self._mesh.device):
            results = flight.part(0)
        assert isinstance(graph.form, Form)
        outcome, _ = graph.form.outcome(results, storages_of(call.params))
        if len(call.microbatches) == 1:
            call.weighing.meet(outcome)
        seeds = (call.seed(outcome) * call.weighing.factors(outcome)).unbind()
        started = [seed.to(mean.total.dtype) for seed, mean in zip(seeds, outcome.means)]
        flight.differentiate(started, sums)
        return outcome

    def _half(self, call: StepInputs, index: int) -> tuple[StageGraph, Mapping[Any, Any]]:
        """The graphs of forward and of backward of a micro-batch of this form, and what lengths are in it."""
        plan, mesh, fn, wanted = self._plan, self._mesh, self._fn, wants(self._fn, "rng")
        batch, key = call.microbatches[index], call.keys[index]

        def run(params: Any, _: Any, batch: Any, rng: Any = None) -> Any:
            return fn(params, batch, **({"rng": rng} if wanted and rng is not None else {}))

        def traced(lengths: Lengths) -> StageGraph:
            return trace_stage(
                lambda blocks: Function(run, plan, mesh, True, blocks),
                shards_of(plan, call.params),
                None,
                batch,
                key,
                call.thinned[index],
                True,
                False,
                True,
                self._between,
                self._without,
                call.named(index, mesh),
                self._inductor,
                lengths,
            )

        return self._halves.of(lambda: (form_of(batch), key is None, closed_over(fn)), traced)

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
        batch, key = call.microbatches[index], call.keys[index]
        traced, lengths = self._traced(call, index, buffers, kept)
        self._note(traced, options)
        stored = shards_of(self._plan, call.params).values()
        start = call.loss_scale * (1.0 if traced.form.weighted else call.share)
        seed = torch.full((), start, dtype=torch.float64, device=self._mesh.device)
        tensors = tensors_of((batch, buffers))
        draws = [] if key is None else traced.stands.values(key, lengths)
        with torch.no_grad(), seeding_torch(key, self._mesh.device), closing(self._between):
            outputs = traced.module(*stored, *tensors, *kept.values(), seed, *draws, land, *sums.values())
        outcome, rest = traced.form.outcome(outputs, storages_of(call.params))
        names = [] if sums else [bucket.name for bucket in self._plan.tiled.trained]
        results = dict(zip((*names, *kept), rest, strict=True))
        return outcome, {name: results[name] for name in names}, {name: results[name] for name in kept}

    def _order(self, call: StepInputs, kept: dict[str, torch.Tensor]) -> list[Any] | None:
        """The exchanges of the graph of the first micro-batch."""
        self._begin(call)
        if self._halved:
            self._half(call, 0)
            return self._halves.order
        self._traced(call, 0, call.buffers, kept)
        return self._graphs.order

    def _traced(
        self, call: StepInputs, index: int, buffers: Any, kept: dict[str, torch.Tensor]
    ) -> tuple[Traced, Mapping[Any, Any]]:
        """The graph of a micro-batch of this form, and what lengths are in it."""
        plan, mesh, reduces = self._plan, self._mesh, self._reduces(call)
        shards = shards_of(plan, call.params)
        batch, key = call.microbatches[index], call.keys[index]

        def traced(lengths: Lengths) -> Traced:
            found = trace(
                lambda blocks: Function(self._fn, plan, mesh, True, blocks),
                {bucket.name: _like(shards[bucket.name], bucket) for bucket in plan.tiled.buckets},
                kept,
                batch,
                buffers if self._with_buffers else None,
                key,
                call.thinned[index],
                reduces,
                call.named(index, mesh),
                mesh.device,
                lengths,
            )
            lands = [
                tile.name if leaves and (reduces or plan.lands_each(bucket)) else None
                for bucket in plan.trained
                for leaves in [bucket.memory.optimizer != "device" or bucket.tiles > 1]
                for tile in bucket.cut
            ]
            summed = len(plan.tiled.trained) if self._adds(call) else 0
            optimise(found, self._between, lands, self._without, summed, inductor=self._inductor)
            return found

        return self._graphs.of(lambda: (form_of(batch, buffers), key is None, closed_over(self._fn)), traced)


class _Gradients:
    """One step's gradients, summed over micro-batches: on the device, or where they land."""

    def __init__(self, plan: Plan, mesh: Mesh, landing: Landing | None) -> None:
        self._plan, self._landing = plan, landing
        self._leaf_of = {tile.name: bucket for bucket in plan.trained for tile in bucket.cut}
        self._held: dict[str, torch.Tensor] = {}
        self._joined: dict[str, torch.Tensor] = {}  # of leaves in tiles, whose gradient is never there twice
        self._landed: dict[str, torch.Tensor] = {}
        self._taken: set[str] = set()  # by `land`, in this micro-batch
        leaves = plan.step.total_microbatches
        self._trees = (
            {} if leaves is None else {bucket.name: TreeSum[torch.Tensor](leaves) for bucket in plan.tiled.trained}
        )
        self._first = batch_index(plan, mesh) * plan.step.microbatches  # the first micro-batch of this rank, among all

    def land(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        """See `shardlib.execute.graph.land`."""
        bucket = self._leaf_of[name]
        landing = self._landing if self._landing and self._landing.takes(bucket) else None
        if bucket.tiles > 1 and (landing is not None or self._plan.step.microbatches == 1):
            if bucket.name not in self._joined:
                self._joined[bucket.name] = gradient.new_empty(bucket.tiles * gradient.numel())
            tiles = [tile.name for tile in bucket.cut]
            gradient = bucket.of_tiles(self._joined[bucket.name])[tiles.index(name)].copy_(gradient)
            self._taken.add(name)
            if landing is None or not self._taken.issuperset(tiles):
                return gradient
            gradient = self._joined.pop(bucket.name)
        if landing is not None:
            self._taken.add(name)
            gradient = self._landed[bucket.name] = landing.take(bucket, gradient)
        return gradient

    def add(self, index: int, gradients: Mapping[str, torch.Tensor]) -> None:
        """Add those of one micro-batch, whose memory may be used up."""
        for name, new in gradients.items():
            if name in self._taken:
                continue
            if self._trees:
                self._trees[name].add(Node(0, self._first + index), new)
            else:
                self._held[name] = self._held[name].add_(new) if name in self._held else new
        self._taken.clear()

    def sums(self) -> dict[str, torch.Tensor]:
        """Bucket name -> the sum, or as many as there are nodes of the tree in which micro-batches are added."""
        nodes = self._plan.step.nodes
        return (
            self._held
            | self._joined
            | self._landed
            | {name: joined(tree.sums, nodes) for name, tree in self._trees.items()}
        )


def _like(stored: torch.Tensor | BufferOnDisk, bucket: Bucket) -> torch.Tensor:
    """A tensor of the form of a stored buffer."""
    if isinstance(stored, torch.Tensor):
        return stored
    return torch.zeros((), dtype=bucket.dtype).expand(bucket.size(bucket.param_level))
