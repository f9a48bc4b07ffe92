"""The graphs of a pipeline's stage: of its forward, and of its backward in one part or in two.

A plan without a pipeline is one stage, where something must happen between forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from shardlib.execute.collective_order import Record
from shardlib.execute.context import Surroundings
from shardlib.execute.gradients import ReductionOptions
from shardlib.execute.graph.analysis import order_of
from shardlib.execute.graph.closed import closed_over
from shardlib.execute.graph.forms import Graphs, form_of
from shardlib.execute.graph.fuse import module_of
from shardlib.execute.graph.nodes import FORWARD, PHASE, changes, copied
from shardlib.execute.graph.overlap import overlap
from shardlib.execute.graph.passes import GraphOptions, optimise
from shardlib.execute.graph.recorder import Lengths
from shardlib.execute.graph.sums import StageSums, accumulate
from shardlib.execute.graph.trace import (
    GivenInputs,
    MicroBatch,
    OutcomeForm,
    Traced,
    TraceRecorder,
    TreeForm,
    recorded,
    require_one_mean,
)
from shardlib.execute.handles import materialise
from shardlib.execute.losses import Outcome, read_loss, require_gradient
from shardlib.execute.refusals import require_open, storages_of
from shardlib.execute.stages.one import StepInputs
from shardlib.execute.stages.runs import Grads, Run, differentiable, without_memory
from shardlib.execute.values.function import Function, gradients_of
from shardlib.execute.values.keeping import Between
from shardlib.mesh.mesh import Mesh
from shardlib.nn.blocks import Runner
from shardlib.plan.buckets import Bucket
from shardlib.plan.plan import Plan
from shardlib.rng import seeding_torch
from shardlib.sharded.params_on_disk import BufferOnDisk
from shardlib.sharded.tree import Sharded
from shardlib.tree import Tree, tensors_of, tree_map

Store = dict[Node, Any]  # nodes of the whole graph -> the values that later parts take


class StagePart:
    """A part of a graph, which returns ``results``.

    Args:
        inputs: of the whole graph, which each part is given.
        taken: the nodes whose values later parts take from the store.
        gradients: how many of the results, the last ones, are added to further inputs.

    Attributes:
        graph: of the part.
        takes: the nodes of the whole graph whose values it takes from the store.
        computes: whether there is anything in it.
    """

    graph: Graph

    def __init__(
        self,
        whole: Traced,
        members: Sequence[Node],
        results: Sequence[Node],
        inputs: Sequence[Node],
        taken: Collection[Node],
        gradients: int,
        options: GraphOptions,
    ) -> None:
        own = {*members, *inputs}
        used = [each for node in members for each in node.all_input_nodes]
        self.takes: list[Node] = list(dict.fromkeys(node for node in (*used, *results) if node not in own))
        self._makes = [node for node in members if node in taken]
        self._stays = {node for node in self.takes if node in taken}
        self.computes: bool = bool(members)
        self.graph = graph = Graph()
        given = graph.placeholder("given")
        known = {node: graph.node_copy(node) for node in inputs}
        for node in reversed(self.takes):
            # From the end of a list, so that each goes with its last use: an argument would stay until the end.
            known[node] = graph.call_method("pop", (given,))
            known[node].meta = dict(node.meta)
        for node in members:
            copied(node, known, graph)
        graph.output([known[node] for node in (*results, *self._makes)])
        if options.has("overlap"):
            overlap(graph)
        accumulate(graph, len(results) - gradients, gradients)
        self._run = module_of(whole.constants, graph, options.inductor)

    def __call__(self, store: Store, inputs: Sequence[Any]) -> list[Any]:
        """The part's results. ``inputs`` are those that each part is given, and for the last one sums of gradients."""
        values = [store[node] if node in self._stays else store.pop(node) for node in self.takes]
        found = self._run(values, *inputs)
        results = len(found) - len(self._makes)
        store.update(zip(self._makes, found[results:], strict=True))
        return found[:results]


def cut(
    whole: Traced,
    results: Sequence[Sequence[Node]],
    inputs: Sequence[Node],
    stored: Sequence[Node],
    gradients: int,
    options: GraphOptions,
) -> list[StagePart]:
    """Forward, and backward in one part or in two: what its first results need, and the rest.

    Args:
        results: of forward, and of each part of backward.
        gradients: how many results, the last ones, are gradients to be added to sums.
        inputs: what each part is given.
        stored: nodes whose values the caller stores.
    """
    outside = {*inputs, *stored}
    nodes = [node for node in whole.graph.nodes if node.op != "output" and node not in outside]
    forward, backward = (
        [node for node in nodes if (node.meta.get(PHASE) == FORWARD) is first] for first in (True, False)
    )
    members = [forward, backward]
    if len(results) == 3:
        # What is written to has no one value: then all of it is the first part.
        first = set(backward) if any(map(changes, backward)) else _needed(results[1], set(backward))
        members = [forward, *([node for node in backward if (node in first) is now] for now in (True, False))]
    parts, taken = list[StagePart](), set[Node]()
    for own, wanted in zip(reversed(members), reversed(results)):
        parts.insert(0, StagePart(whole, own, wanted, inputs, taken, 0 if parts else gradients, options))
        taken.update(parts[0].takes)
    return parts


def _needed(results: Sequence[Node], among: set[Node]) -> set[Node]:
    found, todo = set[Node](), list(results)
    while todo:
        node = todo.pop()
        if node in among and node not in found:
            found.add(node)
            todo += node.all_input_nodes
    return found


@dataclass(frozen=True)
class CarryForm:
    """The form of what a stage hands on, and which of its tensors need gradients."""

    tree: TreeForm
    wanted: tuple[bool, ...]

    def of(self, tensors: Sequence[torch.Tensor]) -> Tree:
        """The carry of these tensors, leaves of a new graph."""
        leaves = [tensor.requires_grad_(wants) for tensor, wants in zip(tensors, self.wanted, strict=True)]
        return self.tree.filled(iter(leaves))


@dataclass(frozen=True)
class StageGraph:
    """The graphs of a stage.

    Attributes:
        parts: forward, which returns the tensors of what is handed on, or of an outcome; and backward in one part or two,
            the first of which returns the gradients of the carry, and the last adds those of buckets to sums. They are given
            buffers and draws, and the last one sums.
        entering: in the store, the tensors of what the stage is given.
        starts: in the store, the gradients from which backward starts; None for one that nothing needs.
        form: of what forward returns.
        traced: the whole graph.
    """

    parts: Sequence[StagePart]
    entering: Sequence[Node]
    starts: Sequence[Node | None]
    form: CarryForm | OutcomeForm
    traced: Traced

    def order(self) -> list[Any]:
        """The exchanges, in order."""
        return [exchange for part in self.parts for exchange in order_of(part.graph)]

    def stored(self, nodes: Sequence[Node | None], values: Sequence[torch.Tensor]) -> Store:
        """What the parts take of these values."""
        taken = {node for part in self.parts for node in part.takes}
        return {node: value for node, value in zip(nodes, values, strict=True) if node in taken}


class GraphedStage:
    """A stage whose forward and backward are graphs of their own: one of this rank's, or, without a number, all of a loss.

    Args:
        fn: of the stage's parameters and of what it is given: a carry, in a pipeline, and a batch.
        reads: the user's functions in it.
        last: whether what it returns is the loss.
    """

    plan: Plan
    mesh: Mesh
    number: int | None
    between: Between

    def __init__(
        self,
        fn: Any,
        reads: Any,
        plan: Plan,
        mesh: Mesh,
        number: int | None,
        last: bool,
        between: Between,
        options: GraphOptions,
    ) -> None:
        self._fn, self._reads, self.plan, self.mesh, self.number, self._last = fn, reads, plan, mesh, number, last
        self.between, self._options = between, options
        self.function: Function = Function(fn, plan, mesh, True)
        self.graphs: Graphs[StageGraph] = Graphs[StageGraph](StageGraph.order, options.inductor is None)

    def named(self) -> dict[str, Graph]:
        """The graphs that there are, each with a name."""
        names = ("forward", "backward", "backward of parameters")
        return {
            f"{what}, {name}": part.graph
            for name, each in self.graphs.named()
            for what, part in zip(names, each.parts)
            if part.computes
        }

    def graph(self, call: StepInputs, index: int, trees: Sequence[Tree]) -> tuple[StageGraph, Mapping[Any, Any]]:
        """The graph for what a micro-batch of this form is given, and what lengths are in it."""

        def traced(lengths: Lengths) -> StageGraph:
            of = micro_batch(self._fn, self._reads, self.plan, self.mesh, call, index, trees, lengths)
            halved = self.number is not None and self.plan.stages.schedule.splits
            return trace_stage(of, self._last, halved, self.number is None, self.between, self._options)

        key = call.keys[index]
        return self.graphs.of(lambda: (form_of(*trees), key is None, closed_over(self._reads, trees)), traced)


class GraphRun(Run):
    """A run of a stage's graphs.

    Attributes:
        outcome: of the loss, in the last stage.
    """

    inputs: list[Any]
    outputs: list[Any]

    outcome: Outcome

    def __init__(
        self,
        stage: GraphedStage,
        call: StepInputs,
        index: int,
        sums: StageSums,
        options: ReductionOptions,
        record: Record,
    ) -> None:
        super().__init__()
        self._stage, self._call, self._index, self._sums = stage, call, index, sums
        self._options, self._record = options, record
        self._store: Store = {}

    def forward(self, arrived: Tree) -> Tree:
        stage, call = self._stage, self._call
        batch, key = call.microbatches[self._index], call.keys[self._index]
        trees = (batch,) if stage.number is None else (arrived, batch)
        self._graph, lengths = graph, _ = stage.graph(call, self._index, trees)
        note(graph.traced, self._options, self._record)
        draws = [] if key is None else graph.traced.stands.values(key, lengths)
        self._given = [*shards_of(stage.plan, call.params).values(), *draws]
        self._store = graph.stored(graph.entering, tensors_of(trees))
        seed = key.fold_in(stage.number) if key is not None and stage.number is not None else key
        with seeding_torch(seed, stage.mesh.device):
            results = self._part(0)
        if isinstance(graph.form, CarryForm):
            result = graph.form.of(results)
        else:
            self.outcome, _ = graph.form.outcome(results, storages_of(call.params))
            result = self.outcome.total.detach().requires_grad_()
        self.inputs, self.outputs = [*map(without_memory, differentiable(arrived))], differentiable(result)
        return result

    def backward(self, seeds: Sequence[torch.Tensor]) -> Grads:
        grads = self._first_half(seeds)
        if len(self._graph.parts) > 2:
            self._second_half()
        return grads

    def _first_half(self, seeds: Sequence[torch.Tensor]) -> Grads:
        self._store |= self._graph.stored(self._graph.starts, seeds)
        return self._part(1)

    def _second_half(self) -> None:
        self._part(2)

    def _part(self, number: int) -> list[torch.Tensor]:
        """The results of one of the stage's graphs. The last one adds gradients to the stage's sums."""
        parts = self._graph.parts
        sums = self._sums.tensors if number == len(parts) - 1 else ()
        with torch.no_grad():
            return parts[number](self._store, [*self._given, *sums])

    def close(self) -> None:
        self._store.clear()


def micro_batch(
    fn: Any, reads: Any, plan: Plan, mesh: Mesh, call: StepInputs, index: int, trees: Sequence[Tree], lengths: Lengths
) -> MicroBatch:
    """One of a step's micro-batches, for a trace of ``fn``, which is given ``trees`` after parameters. ``reads``: the user's
    functions in it."""
    shards = shards_of(plan, call.params)
    stored = {bucket.name: _like(shards[bucket.name], bucket) for bucket in plan.tiled.buckets}

    def function(blocks: Callable[[Surroundings], Runner]) -> Function:
        return Function(fn, plan, mesh, True, blocks)

    return MicroBatch(
        function, reads, stored, trees, lengths, call.keys[index], call.drops[index], call.named(index, mesh)
    )


def _like(stored: torch.Tensor | BufferOnDisk, bucket: Bucket) -> torch.Tensor:
    """A tensor of the form of a stored buffer."""
    if isinstance(stored, torch.Tensor):
        return stored
    return torch.zeros((), dtype=bucket.dtype).expand(bucket.size(bucket.param_level))


def note(traced: Traced, options: ReductionOptions, record: Record) -> None:
    """Note what a micro-batch of a graph uses."""
    options.note(traced.reached)
    record.layer_tokens += traced.layer_tokens


def shards_of(plan: Plan, params: Sharded) -> dict[str, Any]:
    """This rank's buffers, or what reads them from disk, by bucket as a step runs it: of each of a leaf's tiles."""
    return {
        tile.name: part for bucket in plan.buckets for tile, part in zip(bucket.cut, params.parts(bucket), strict=True)
    }


def trace_stage(
    of: MicroBatch, last: bool, halved: bool, several: bool, between: Between, options: GraphOptions
) -> StageGraph:
    """Trace one micro-batch of a stage.

    Args:
        last: whether what it returns is the loss.
        halved: whether backward is in two parts.
        several: whether it may be a sum of several means, from each of whose totals backward starts.
    """
    form: list[CarryForm | OutcomeForm] = []
    seeds: list[Node | None] = []  # stand for the gradients from which backward starts
    sizes: list[int] = []  # results, and gradients of buckets

    def forward(
        loss: Function, given: GivenInputs
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], dict[str, torch.Tensor]]:
        """The results, those of them from which backward starts, and by what it differentiates."""
        wanted = {name: slot.requires_grad_() for name, slot in loss.slots().items()}

        def enter(now: Any, was: Any) -> Any:
            if not isinstance(was, torch.Tensor) or not was.requires_grad:
                return now
            return wanted.setdefault(f"input {len(wanted)}", now.detach().requires_grad_())

        trees = [tree_map(enter, now, was) for now, was in zip(given.trees, of.trees, strict=True)]
        result = materialise(loss(given.stored, wanted, *trees, key=given.key, drops=of.drops))
        form.clear()
        if last:
            outcome = read_loss(result, False)
            require_gradient(outcome, None, of.named)
            if not several:
                require_one_mean(outcome)
            made, results = OutcomeForm.of(outcome)
            form.append(made)
            return results, [mean.total for mean in outcome.means], wanted
        require_open(result, "what passes between pipeline stages")
        results = tensors_of(result)
        form.append(CarryForm(TreeForm.of(result), tuple(tensor.requires_grad for tensor in results)))
        return results, differentiable(result), wanted

    def backward(loss: Function, found: Any, _: list[torch.Tensor], recorder: TraceRecorder) -> list[torch.Tensor]:
        results, starts, wanted = found
        cotangents = [torch.empty_like(tensor) for tensor in starts]
        seeds[:] = map(recorder.node_of, cotangents)
        gradients = list(gradients_of(starts, cotangents, wanted).values())
        recorder.turn()
        sizes[:] = len(results), len(loss.slots())
        return [*results, *gradients]

    traced = recorded(of, forward, backward)
    optimise(traced, between, options, apart=True)
    nodes = list(traced.graph.nodes)
    given = [node for node in nodes if node.op == "placeholder"]
    entering = given[len(of.stored) :][: len(tensors_of(of.trees))]
    inputs = [node for node in given if node not in entering]
    (outputs,) = nodes[-1].args
    results, weights, rest = outputs[: sizes[0]], outputs[sizes[0] : sum(sizes)], outputs[sum(sizes) :]
    there = set(nodes)
    starts = [seed if seed in there else None for seed in seeds]
    parts = cut(
        traced,
        [results, rest, weights] if halved else [results, [*rest, *weights]],
        inputs,
        [*entering, *filter(None, starts)],
        len(weights),
        options,
    )
    return StageGraph(parts, entering, starts, form[0], traced)
