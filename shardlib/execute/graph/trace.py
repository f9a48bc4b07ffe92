"""The trace of one micro-batch: loss, backward and exchanges as one graph, on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from shardlib.common._compat import graph_of, recording
from shardlib.common.environment import within
from shardlib.common.once import Decision
from shardlib.errors import IllegalComposition
from shardlib.execute.graph.keys import Stands
from shardlib.execute.graph.twice import Calls, require_same, without_random_numbers
from shardlib.execute.losses import Outcome, require_gradient
from shardlib.execute.surroundings import Surroundings
from shardlib.execute.values.function import Function, gradients_of
from shardlib.nn.blocks import Runner
from shardlib.nn.functional import Mean
from shardlib.rng import Key
from shardlib.tree import Tree, TreeDef, flatten, unflatten

FORWARD, BACKWARD, REDUCTION = "forward", "backward", "reduction"
# Keys of a node's meta: the part of the step it belongs to, the number of its block, and whether it is part of a decision.
PHASE, BLOCK, DECIDED = "phase", "block", "decided"


@dataclass(frozen=True)
class Form:
    """What the results of a graph are made into: the structure of aux and buffers, and their leaves that are no tensors.

    Attributes:
        terms: the number of means in the loss.
        weighted: whether the loss is a `Mean`, or a sum of means.
    """

    terms: int
    weighted: bool
    aux: tuple[TreeDef, tuple[Any, ...]]
    buffers: tuple[TreeDef, tuple[Any, ...]]

    def results(self, outputs: Sequence[torch.Tensor]) -> tuple[tuple[Mean, ...], Tree, Tree, Sequence[torch.Tensor]]:
        """Means, aux and buffers, and the outputs after those."""
        means = tuple(Mean(*outputs[2 * term : 2 * term + 2]) for term in range(self.terms))
        rest = iter(outputs[2 * self.terms :])
        trees = [
            unflatten(treedef, [next(rest) if other is None else other for other in others])
            for treedef, others in (self.aux, self.buffers)
        ]
        return means, trees[0], trees[1], list(rest)


@dataclass
class Traced:
    """A graph and what its inputs and outputs are.

    Attributes:
        module: takes this rank's buffers in the plan's order, the tensors of the batch and of the loss's buffers, what codecs
            keep, the number from which backward starts, what draws take, and what `land` calls; returns totals and weights,
            the tensors of aux and buffers, a gradient for each trained bucket, and what codecs keep then. It runs as it is
            traced until it is recompiled.
        form: of the results.
        stands: of the draws.
        gradients: the number of the first gradient among what the graph returns.
        links: what the graph's exchanges go along; they live as long as it does.
    """

    module: torch.fx.GraphModule
    form: Form
    stands: Stands
    gradients: int
    links: list[Any]


class _Spans:
    """The blocks and the decisions of a traced function: which nodes each has made.

    Attributes:
        marks: nodes after each of which another block, or none (None), begins.
        decisions: the nodes after which a decision begins, and ends.
    """

    def __init__(self) -> None:
        self.marks: list[tuple[torch.fx.Node | None, int | None]] = []
        self.decisions: list[tuple[torch.fx.Node | None, torch.fx.Node | None]] = []
        self._count, self._depth = 0, 0

    def runner(self, surroundings: Surroundings) -> Runner:
        def run(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if self._depth:
                return fn(*args, **kwargs)
            self._depth = 1
            self.marks.append((last_node(), self._count))
            self._count += 1
            try:
                return fn(*args, **kwargs)
            finally:
                self._depth = 0
                self.marks.append((last_node(), None))

        return run

    @contextmanager
    def deciding(self) -> Iterator[None]:
        """A context in which decisions (`shardlib.common.once`) are noted."""

        def made(decide: Decision) -> list[torch.Tensor]:
            begins = last_node()
            result = decide()
            if (ends := last_node()) is not begins:
                self.decisions.append((begins, ends))
            return result

        with within(decides=made):
            yield


def last_node() -> torch.fx.Node | None:
    """The node that the trace under way made last."""
    mode = recording()
    return None if mode is None else next(iter(reversed(mode.tracer.graph.nodes)), None)


def trace(
    function: Callable[[Callable[[Surroundings], Runner]], Function],
    stored: Mapping[str, torch.Tensor],
    kept: Mapping[str, torch.Tensor],
    batch: Tree,
    buffers: Tree,
    key: Key | None,
    reduces: bool,
    named: str,
) -> Traced:
    """Trace one micro-batch.

    Args:
        function: makes the loss as a function of shards, given how its blocks run.
        kept: what codecs keep, by name.
        buffers: what the loss takes second, or None.
        key: the micro-batch's key.
        reduces: whether gradients are summed over ranks as the optimizer holds them, or as they are accumulated.
        named: the micro-batch, for messages.
    """
    spans, stands, calls = _Spans(), Stands(), Calls()
    loss = function(spans.runner)
    names = list(stored)
    _, batch_leaves, batch_def = flatten(batch)
    _, buffer_leaves, buffer_def = flatten(buffers)
    form: list[Form] = []
    turns: list[torch.fx.Node | None] = []

    def forward(tensors: Sequence[torch.Tensor], stands: Stands) -> tuple[Outcome, dict[str, torch.Tensor]]:
        rest = iter(tensors)
        given = {name: next(rest) for name in names}
        slots = {name: slot.requires_grad_() for name, slot in loss.slots().items()}
        filled = _filled(batch_def, batch_leaves, rest)
        left = None if buffers is None else _filled(buffer_def, buffer_leaves, rest)
        return loss.outcome(given, slots, filled, None if key is None else stands.key(key.slot), left), slots

    def run(*inputs: torch.Tensor) -> list[torch.Tensor]:
        *tensors, seed = inputs
        keeping = dict(zip(kept, tensors[len(tensors) - len(kept) :], strict=True))
        with calls, spans.deciding():
            outcome, slots = forward(tensors, stands)
        require_gradient(outcome, None, named)
        if len(outcome.means) > 1:
            raise IllegalComposition("a sum of several sl.Mean, whose weights must be known before its backward")
        turns.append(last_node())
        gradients = gradients_of([mean.total for mean in outcome.means], [seed], slots)
        turns.append(last_node())
        gradients = loss.accumulated(gradients, keeping)
        if reduces:
            gradients = loss.reduced(gradients, keeping)
        aux, treedef = _tensors(outcome.aux)
        left, left_def = _tensors(outcome.buffers)
        form.append(Form(len(outcome.means), outcome.weighted, treedef, left_def))
        numbers = [number for mean in outcome.means for number in mean]
        return [*numbers, *aux, *left, *gradients.values(), *keeping.values()]

    tensors = [*stored.values(), *_only_tensors(batch_leaves), *_only_tensors(buffer_leaves), *kept.values()]
    seed = torch.ones((), dtype=torch.float64, device=loss.mesh.device)
    with torch.enable_grad(), without_random_numbers():
        module = graph_of(run, *tensors, seed)
    _mark(module.graph, turns, spans)
    require_same(calls, lambda *tensors: forward(tensors, Stands()), tensors)
    stands.made_inputs(module.graph)
    *_, output = module.graph.nodes
    first = len(output.args[0]) - len(kept) - len(loss.trained)
    return Traced(module, form[0], stands, first, [loss])


def _mark(graph: torch.fx.Graph, turns: Sequence[torch.fx.Node | None], spans: _Spans) -> None:
    """Note each node's phase and block, and whether it is part of a decision."""
    phases, blocks = iter((BACKWARD, REDUCTION)), dict(spans.marks)
    phase, block, decided = FORWARD, None, False
    begins, ends = (set(nodes) for nodes in (zip(*spans.decisions) if spans.decisions else ((), ())))
    for node in graph.nodes:
        node.meta[PHASE], node.meta[BLOCK], node.meta[DECIDED] = phase, block, decided
        decided = node in begins or (decided and node not in ends)
        if node in turns:
            for _ in range(list(turns).count(node)):
                phase, block = next(phases), None
        block = blocks.get(node, block) if phase == FORWARD else None


def _tensors(tree: Tree) -> tuple[list[torch.Tensor], tuple[TreeDef, tuple[Any, ...]]]:
    _, leaves, treedef = flatten(tree)
    others = tuple(None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
    return _only_tensors(leaves), (treedef, others)


def _only_tensors(leaves: Sequence[Any]) -> list[torch.Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _filled(treedef: TreeDef, leaves: Sequence[Any], tensors: Iterator[torch.Tensor]) -> Tree:
    """A tree with other tensors in the place of its own."""
    return unflatten(treedef, [next(tensors) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves])
