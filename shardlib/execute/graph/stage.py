"""The graphs of a pipeline's stage: of its forward, and of its backward in one part or in two.

A plan without a pipeline is one stage, where something must happen between forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.fx import Node

from shardlib.execute.context import Surroundings
from shardlib.execute.graph.alive import order_of
from shardlib.execute.graph.fuse import Inductor
from shardlib.execute.graph.keys import Stands
from shardlib.execute.graph.lengths import Lengths
from shardlib.execute.graph.parts import GraphPart, Store, cut
from shardlib.execute.graph.passes import optimise
from shardlib.execute.graph.trace import Form, Given, Spans, form_of_tree, recorded, require_one_mean, tensors_of
from shardlib.execute.handles import materialise
from shardlib.execute.losses import read_loss, require_gradient
from shardlib.execute.refusals import require_open
from shardlib.execute.values.function import Function, gradients_of
from shardlib.execute.values.keeping import Between
from shardlib.nn.blocks import Runner
from shardlib.plan.plan import Plan
from shardlib.plan.thinning import Thinned
from shardlib.rng import Key
from shardlib.sharded.tree import Sharded
from shardlib.tree import Tree, TreeDef, tree_map, unflatten


@dataclass(frozen=True)
class Carry:
    """The form of what a stage hands on: its structure, its leaves that are no tensors, and which tensors need gradients."""

    structure: TreeDef
    others: tuple[Any, ...]
    wanted: tuple[bool, ...]

    def of(self, tensors: Sequence[torch.Tensor]) -> Tree:
        """The carry of these tensors, leaves of a new graph."""
        leaves = iter([tensor.requires_grad_(wants) for tensor, wants in zip(tensors, self.wanted, strict=True)])
        return unflatten(self.structure, [next(leaves) if other is None else other for other in self.others])


@dataclass(frozen=True)
class StageGraph:
    """The graphs of a stage.

    Attributes:
        parts: forward, which returns the tensors of what is handed on, or of an outcome; and backward in one part or two,
            the first of which returns the gradients of the carry, and the last adds those of buckets to sums. They are given
            buffers and draws, and the last one sums.
        entering: in the store, the tensors of the carry and of the batch.
        starts: in the store, the gradients from which backward starts; None for one that nothing needs.
        form: of what forward returns.
        stands: of the draws.
        reached: the paths of leaves that have a gradient.
        layer_tokens: tokens that layers see, where the plan leaves out some.
        links: what the exchanges go along.
    """

    parts: Sequence[GraphPart]
    entering: Sequence[Node]
    starts: Sequence[Node | None]
    form: Carry | Form
    stands: Stands
    reached: set[str]
    layer_tokens: int
    links: Sequence[Any]

    def order(self) -> list[Any]:
        """The exchanges, in order."""
        return [exchange for part in self.parts for exchange in order_of(part.graph)]

    def flight(
        self, shards: Sequence[torch.Tensor], key: Key | None, entering: Tree, lengths: Mapping[Any, Any]
    ) -> StageRun:
        """The flight of a micro-batch, which the stage is given ``entering``, its carry and its batch, with ``lengths``."""
        draws = [] if key is None else self.stands.values(key, lengths)
        return StageRun(self, [*shards, *draws], self.stored(self.entering, tensors_of(entering)))

    def stored(self, nodes: Sequence[Node | None], values: Sequence[torch.Tensor]) -> Store:
        """What the parts take of these values."""
        taken = {node for part in self.parts for node in part.takes}
        return {node: value for node, value in zip(nodes, values, strict=True) if node in taken}


class StageRun:
    """A micro-batch in a stage, between its forward and the end of its backward. In the place of an `Executor`.

    Args:
        inputs: buffers and draws.

    Attributes:
        result: of forward, until it is passed on.
    """

    def __init__(self, graph: StageGraph, inputs: Sequence[Any], store: Store) -> None:
        self._graph, self._inputs, self._store = graph, inputs, store
        self.result: Any = None

    def part(self, number: int, sums: Sequence[torch.Tensor] = ()) -> list[torch.Tensor]:
        """The results of one of the stage's graphs."""
        with torch.no_grad():
            return self._graph.parts[number](self._store, [*self._inputs, *sums])

    def differentiate(self, seeds: Sequence[torch.Tensor], sums: StageSums) -> list[torch.Tensor]:
        """The gradients of the inputs; those of parameters are added to ``sums``."""
        if len(self._graph.parts) > 2:
            found = self.inputs_gradient(seeds)
            self.weights_gradient(sums)
            return found
        self._start(seeds)
        return self.part(1, sums.tensors)

    def inputs_gradient(self, seeds: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The gradients of the inputs alone."""
        self._start(seeds)
        return self.part(1)

    def weights_gradient(self, sums: StageSums) -> None:
        """Add the gradients of parameters to ``sums``, after `inputs_gradient`."""
        self.part(2, sums.tensors)

    def _start(self, seeds: Sequence[torch.Tensor]) -> None:
        self._store |= self._graph.stored(self._graph.starts, seeds)

    def close(self) -> None:
        self._store.clear()


def shards_of(plan: Plan, params: Sharded) -> dict[str, Any]:
    """This rank's buffers, or what reads them from disk, by bucket as a step runs it: of each of a leaf's tiles."""
    return {
        tile.name: part for bucket in plan.buckets for tile, part in zip(bucket.cut, params.parts(bucket), strict=True)
    }


class StageSums:
    """The sums of a stage's gradients over micro-batches, which are made when the first ones come."""

    def __init__(self, function: Function) -> None:
        self._function = function

    @cached_property
    def _held(self) -> dict[str, torch.Tensor]:
        return self._function.sums()

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """The sums, for a graph to add to."""
        return list(self._function.in_tiles(self._held).values())

    def result(self) -> dict[str, torch.Tensor]:
        """The sums over ranks, as the optimizer holds them."""
        function = self._function
        return function.joined(function.reduced(function.in_tiles(self._held), {}), self._held)

    def land(self) -> None:
        """Nothing is under way between the parts of graphs."""


def trace_stage(
    function: Callable[[Callable[[Surroundings], Runner]], Function],
    stored: Mapping[str, torch.Tensor],
    carry: Tree,
    batch: Tree,
    key: Key | None,
    thinned: Thinned | None,
    last: bool,
    halved: bool,
    several: bool,
    between: Between,
    without: Collection[str],
    named: str,
    inductor: Inductor | None,
    lengths: Lengths,
) -> StageGraph:
    """Trace one micro-batch of a stage.

    Args:
        function: makes the stage as a function of shards, of a carry and of a batch, given how its blocks run.
        thinned: what the step leaves out.
        last: whether what it returns is the loss.
        halved: whether backward is in two parts.
        several: whether it may be a sum of several means, from each of whose totals backward starts.
        named: the micro-batch, for messages.
        inductor: see `optimise`.
        lengths: of ``carry`` and ``batch``.
    """
    form: list[Carry | Form] = []
    seeds: list[Node | None] = []  # stand for the gradients from which backward starts
    sizes: list[int] = []  # results, and gradients of buckets

    def forward(loss: Function, given: Given) -> tuple[list[torch.Tensor], list[torch.Tensor], dict[str, torch.Tensor]]:
        """The results, those of them from which backward starts, and by what it differentiates."""
        wanted = {name: slot.requires_grad_() for name, slot in loss.slots().items()}

        def enter(now: Any, was: Any) -> Any:
            if not isinstance(was, torch.Tensor) or not was.requires_grad:
                return now
            return wanted.setdefault(f"input {len(wanted)}", now.detach().requires_grad_())

        entering = tree_map(enter, given.tree(carry), carry)
        result = materialise(
            loss(given.stored, wanted, entering, given.tree(batch), key=given.key(key), thinned=thinned)
        )
        form.clear()
        if last:
            outcome = read_loss(result, False)
            require_gradient(outcome, None, named)
            if not several:
                require_one_mean(outcome)
            made, results = Form.of(outcome)
            form.append(made)
            return results, [mean.total for mean in outcome.means], wanted
        require_open(result, "what passes between pipeline stages")
        results = tensors_of(result)
        form.append(Carry(*form_of_tree(result), tuple(tensor.requires_grad for tensor in results)))
        return results, [tensor for tensor in results if tensor.requires_grad], wanted

    def backward(loss: Function, found: Any, _: Any, spans: Spans) -> list[torch.Tensor]:
        results, starts, wanted = found
        seeds.clear()
        cotangents = []
        for tensor in starts:
            cotangents.append(torch.empty_like(tensor))
            seeds.append(spans.last)
        gradients = list(gradients_of(starts, cotangents, wanted).values())
        spans.turn()
        sizes[:] = len(results), len(loss.slots())
        return [*results, *gradients]

    traced = recorded(function, stored, [carry, batch], forward, backward, lengths)
    optimise(traced, between, without=without, apart=True)
    nodes = list(traced.graph.nodes)
    given = [node for node in nodes if node.op == "placeholder"]
    entering = given[len(stored) :][: len(tensors_of((carry, batch)))]
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
        "overlap" not in without,
        inductor,
    )
    return StageGraph(
        parts, entering, starts, form[0], traced.stands, traced.reached, traced.layer_tokens, traced.links
    )
