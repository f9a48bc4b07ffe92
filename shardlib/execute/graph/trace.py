"""The trace of one micro-batch: loss, backward and exchanges as one graph, on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardlib.common._compat import without_autocast_cache
from shardlib.errors import IllegalComposition
from shardlib.execute.graph.keys import Stands
from shardlib.execute.graph.recorder import Fakes, Recorder
from shardlib.execute.graph.twice import Repeated, without_random_numbers
from shardlib.execute.losses import Outcome, require_gradient
from shardlib.execute.surroundings import Surroundings
from shardlib.execute.values.function import Function, gradients_of
from shardlib.nn.blocks import Runner
from shardlib.nn.functional import Mean
from shardlib.rng import Key
from shardlib.tree import Tree, TreeDef, flatten, unflatten

FORWARD, BACKWARD, REDUCTION = "forward", "backward", "reduction"
PHASE, BLOCK = (
    "phase",
    "block",
)  # keys of a node's meta: the part of the step it belongs to, and the number of its block


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
        graph: takes this rank's buffers in the plan's order, the tensors of the batch and of the loss's buffers, the number
            from which backward starts, and what draws take; returns totals and weights, the tensors of aux and buffers,
            and a gradient for each trained bucket.
        constants: the tensors that the graph has by name.
        form: of the results.
        stands: of the draws.
        links: what the graph's exchanges go along; they live as long as it does.
        seconds: that trace, passes and code have taken.
        module: the graph as code, once passes have worked on it.
    """

    graph: torch.fx.Graph
    constants: dict[str, torch.Tensor]
    form: Form
    stands: Stands
    links: list[Any]
    seconds: float = 0.0
    module: torch.fx.GraphModule = field(init=False)


class _Spans:
    """The blocks of a traced function: which nodes each has made.

    Attributes:
        marks: nodes after each of which another block, or none (None), begins.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.marks: list[tuple[torch.fx.Node, int | None]] = []
        self._recorder, self._count, self._depth = recorder, 0, 0

    def runner(self, surroundings: Surroundings) -> Runner:
        def run(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if self._depth:
                return fn(*args, **kwargs)
            self._depth = 1
            self.marks.append((self._recorder.last, self._count))
            self._count += 1
            try:
                return fn(*args, **kwargs)
            finally:
                self._depth = 0
                self.marks.append((self._recorder.last, None))

        return run


def trace(
    function: Callable[[Callable[[Surroundings], Runner]], Function],
    stored: Mapping[str, torch.Tensor],
    batch: Tree,
    buffers: Tree,
    key: Key | None,
    reduces: bool,
    named: str,
) -> Traced:
    """Trace one micro-batch.

    Args:
        function: makes the loss as a function of shards, given how its blocks run.
        buffers: what the loss takes second, or None.
        key: the micro-batch's key.
        reduces: whether gradients are summed over ranks as the optimizer holds them, or as they are accumulated.
        named: the micro-batch, for messages.
    """
    fakes, stands = Fakes(), Stands()
    recorder = Recorder(fakes)
    spans = _Spans(recorder)
    loss = function(spans.runner)
    names = list(stored)
    _, batch_leaves, batch_def = flatten(batch)
    _, buffer_leaves, buffer_def = flatten(buffers)
    form: list[Form] = []
    turns: list[torch.fx.Node] = []

    def forward(tensors: Sequence[torch.Tensor], stands: Stands) -> tuple[Outcome, dict[str, torch.Tensor]]:
        rest = iter(tensors)
        given = {name: next(rest) for name in names}
        slots = {name: slot.requires_grad_() for name, slot in loss.slots().items()}
        filled = _filled(batch_def, batch_leaves, rest)
        left = None if buffers is None else _filled(buffer_def, buffer_leaves, rest)
        return loss.outcome(given, slots, filled, None if key is None else stands.key(key.slot), left), slots

    def run(*inputs: torch.Tensor) -> list[torch.Tensor]:
        *tensors, seed = inputs
        outcome, slots = forward(tensors, stands)
        require_gradient(outcome, None, named)
        if len(outcome.means) > 1:
            raise IllegalComposition("a sum of several sl.Mean, whose weights must be known before its backward")
        turns.append(recorder.last)
        gradients = gradients_of([mean.total for mean in outcome.means], [seed], slots)
        turns.append(recorder.last)
        if reduces:
            gradients = loss.reduced(gradients)
        aux, treedef = _tensors(outcome.aux)
        left, left_def = _tensors(outcome.buffers)
        form.append(Form(len(outcome.means), outcome.weighted, treedef, left_def))
        numbers = [number for mean in outcome.means for number in mean]
        return [*numbers, *aux, *left, *gradients.values()]

    tensors = [*stored.values(), *_only_tensors(batch_leaves), *_only_tensors(buffer_leaves)]
    seed = torch.ones((), dtype=torch.float64, device=loss.mesh.device)
    with torch.enable_grad(), without_autocast_cache(), fakes.mode:
        inputs = recorder.inputs([*tensors, seed])
        with without_random_numbers(), recorder:
            recorder.outputs(run(*inputs))
        again = Repeated(recorder, turns[0])
        inputs = again.inputs([*tensors, seed])
        with again:
            forward(inputs[:-1], Stands())
    again.end()
    _mark(recorder.graph, turns, spans.marks)
    stands.made_inputs(recorder.graph)
    return Traced(recorder.graph, recorder.constants, form[0], stands, [loss])


def _mark(
    graph: torch.fx.Graph,
    turns: Sequence[torch.fx.Node],
    marks: Sequence[tuple[torch.fx.Node, int | None]],
) -> None:
    """Note each node's phase and block."""
    phases, blocks = iter((BACKWARD, REDUCTION)), {}
    for node, block in marks:
        blocks[node] = block
    phase, block = FORWARD, None
    for node in graph.nodes:
        node.meta[PHASE], node.meta[BLOCK] = phase, block
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
