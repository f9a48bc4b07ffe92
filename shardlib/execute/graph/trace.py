"""The trace of one micro-batch: loss, backward and exchanges as one graph, on fake tensors."""

from __future__ import annotations

import itertools
import sys
from bisect import bisect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from shardlib.common._compat import next_number, number_of_derivative, pytree, storage_id, without_autocast_cache
from shardlib.common.environment import within
from shardlib.common.once import Decision
from shardlib.errors import IllegalComposition
from shardlib.execute.activation_offload import may_move
from shardlib.execute.context import Surroundings
from shardlib.execute.graph.closed import CallsDiffer, Repeated, without_random_numbers
from shardlib.execute.graph.keys import Stands
from shardlib.execute.graph.lengths import Lengths
from shardlib.execute.graph.nodes import draws, roots_of
from shardlib.execute.graph.recorder import Fakes, Recorder, as_traced
from shardlib.execute.losses import Outcome, require_gradient
from shardlib.execute.stages.base import detached
from shardlib.execute.values.function import Function, gradients_of
from shardlib.nn.blocks import Runner
from shardlib.nn.functional import Mean
from shardlib.plan.thinning import Thinned
from shardlib.rng import Key
from shardlib.tree import Tree, TreeDef, flatten, unflatten

FORWARD, BACKWARD, REDUCTION = "forward", "backward", "reduction"
# Keys of a node's meta: the part of the step it belongs to, the number of its block, and whether it is part of a decision.
PHASE, BLOCK, DECIDED = "phase", "block", "decided"
# The names that blocks give to what a node makes; and, if that is an input of a block or of a checkpoint, the first one's
# number among all of these, and among blocks alone (None of a checkpoint).
NAMES, GIVEN = "names", "given"


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

    @staticmethod
    def of(outcome: Outcome) -> tuple[Form, list[torch.Tensor]]:
        """The form of an outcome, and its tensors."""
        numbers = [number for mean in outcome.means for number in mean]
        made = Form(len(outcome.means), outcome.weighted, form_of_tree(outcome.aux), form_of_tree(outcome.buffers))
        return made, [*numbers, *tensors_of(outcome.aux), *tensors_of(outcome.buffers)]

    def outcome(self, outputs: Sequence[torch.Tensor], held: Collection[int]) -> tuple[Outcome, Sequence[torch.Tensor]]:
        """The outcome, and the outputs after its own. ``held``: the identities of the storages of parameters."""
        means = tuple(Mean(*outputs[2 * term : 2 * term + 2]) for term in range(self.terms))
        rest = iter(outputs[2 * self.terms :])
        trees = [
            unflatten(treedef, [next(rest) if other is None else other for other in others])
            for treedef, others in (self.aux, self.buffers)
        ]
        outcome = Outcome(means, self.weighted, *trees)
        return detached(outcome, lambda tensor: storage_id(tensor.untyped_storage()) in held), list(rest)


@dataclass
class Traced:
    """A graph and what its inputs and outputs are.

    Attributes:
        graph: takes this rank's buffers in the plan's order, the tensors of the batch and of the loss's buffers, what codecs
            keep, the number from which backward starts, what draws take, and what `land` calls; returns totals and weights,
            the tensors of aux and buffers, a gradient for each trained bucket, and what codecs keep then. (A pipeline's stage
            takes and returns others: see `shardlib.execute.graph.stage`.)
        constants: the tensors that the graph has by name.
        stands: of the draws.
        gradients: the number of the first gradient among what the graph returns.
        reached: the paths of leaves that have a gradient.
        layer_tokens: tokens that layers see, where the plan leaves out some.
        form: of the results.
        links: what the graph's exchanges go along; they live as long as it does.
        module: the graph as code, once passes have worked on it.
    """

    graph: torch.fx.Graph
    constants: dict[str, torch.Tensor]
    stands: Stands
    gradients: int
    reached: set[str]
    layer_tokens: int
    links: list[Any]
    form: Any = None
    module: torch.fx.GraphModule = field(init=False)


class Spans:
    """The phases, the blocks and the decisions of a traced function: which nodes each has made.

    Attributes:
        turns: nodes after each of which another phase begins.
        marks: nodes after each of which another block, or none (None), begins.
        decisions: the nodes after which a decision begins, and ends.
        names: the names of what nodes make.
        given: the nodes that are inputs of blocks and of checkpoints; see `GIVEN`.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.turns: list[torch.fx.Node] = []
        self.marks: list[tuple[torch.fx.Node, int | None]] = []
        self.decisions: list[tuple[torch.fx.Node, torch.fx.Node]] = []
        self.names: dict[torch.fx.Node, tuple[str, ...]] = {}
        self.given: dict[torch.fx.Node, tuple[int, int | None]] = {}
        # Of the numbers that autograd's nodes have: each block's first, and that of what follows on the block.
        self._numbers: list[tuple[int, int]] = []
        self._within, self._depth = 0, 0

    @property
    def last(self) -> torch.fx.Node:
        """The node that the trace under way made last."""
        return self._recorder.last

    def turn(self) -> None:
        """Begin the next phase."""
        self._recorder.noting = None if self.turns else self._differentiating
        self.turns.append(self.last)

    def _differentiating(self, node: torch.fx.Node) -> None:
        """Note whose block's derivative a node is part of."""
        number = number_of_derivative()
        place = bisect(self._numbers, (number, sys.maxsize)) - 1
        if place >= 0 and number < self._numbers[place][1]:
            node.meta[BLOCK] = place

    def runner(self, surroundings: Surroundings) -> Runner:
        def run(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if self._depth:
                return fn(*args, **kwargs)
            self._note(pytree.tree_leaves((args, kwargs)), len(self._numbers))
            self._depth = 1
            first = next_number()
            self.marks.append((self.last, len(self._numbers)))
            try:
                with within(names=self._name):
                    return fn(*args, **kwargs)
            finally:
                self._depth = 0
                self.marks.append((self.last, None))
                self._numbers.append((first, next_number()))

        return run

    def keep(self, fn: Callable[..., Any], args: Sequence[Any], has_context: bool) -> tuple[Any, Sequence[Any]]:
        """See `shardlib.execute.activation_offload.ActivationKeeper`: checkpoints of the model's own."""
        if not self._depth and torch.is_grad_enabled():
            self._note(args, None)
        return fn, args

    def _note(self, args: Sequence[Any], block: int | None) -> None:
        """Note the inputs of a block or of a checkpoint."""
        for arg in filter(may_move, args):
            if node := self._recorder.node_of(arg):
                self.given.setdefault(node, (self._within, block))
        self._within += 1

    def _name(self, x: torch.Tensor, name: str) -> torch.Tensor:
        if node := self._recorder.node_of(x):
            self.names[node] = (*self.names.get(node, ()), name)
        return x

    @contextmanager
    def noting(self) -> Iterator[None]:
        """A context in which decisions (`shardlib.common.once`), and inputs of checkpoints, are noted."""

        def made(decide: Decision) -> list[torch.Tensor]:
            begins = self.last
            result = decide()
            if (ends := self.last) is not begins:
                self.decisions.append((begins, ends))
            return result

        with within(decides=made, keeper=self):
            yield


def trace(
    function: Callable[[Callable[[Surroundings], Runner]], Function],
    stored: Mapping[str, torch.Tensor],
    kept: Mapping[str, torch.Tensor],
    batch: Tree,
    buffers: Tree,
    key: Key | None,
    thinned: Thinned | None,
    reduces: bool,
    named: str,
    device: torch.device,
    lengths: Lengths,
) -> Traced:
    """Trace one micro-batch.

    Args:
        function: makes the loss as a function of shards, given how its blocks run.
        kept: what codecs keep, by name.
        buffers: what the loss takes second, or None.
        key: the micro-batch's key.
        thinned: what the step leaves out.
        reduces: whether gradients are summed over ranks as the optimizer holds them, or as they are accumulated.
        named: the micro-batch, for messages.
        lengths: of ``batch`` and ``buffers``.
    """
    form: list[Form] = []

    def forward(loss: Function, given: Given) -> tuple[Outcome, dict[str, torch.Tensor]]:
        slots = {name: slot.requires_grad_() for name, slot in loss.slots().items()}
        filled, left = given.tree(batch), None if buffers is None else given.tree(buffers)
        return loss.outcome(given.stored, slots, filled, given.key(key), left, thinned), slots

    def backward(loss: Function, found: Any, more: Sequence[torch.Tensor], spans: Spans) -> list[torch.Tensor]:
        outcome, slots = found
        *held, seed = more
        keeping = dict(zip(kept, held, strict=True))
        require_gradient(outcome, None, named)
        require_one_mean(outcome)
        gradients = gradients_of([mean.total for mean in outcome.means], [seed], slots)
        spans.turn()
        gradients = loss.accumulated(gradients, keeping)
        if reduces:
            gradients = loss.reduced(gradients, keeping)
        made, numbers = Form.of(outcome)
        form.append(made)
        return [*numbers, *gradients.values(), *keeping.values()]

    seed = torch.ones((), dtype=torch.float64, device=device)
    traced = recorded(function, stored, [batch, buffers], forward, backward, lengths, [*kept.values(), seed])
    traced.gradients -= len(kept)
    traced.form = form[-1]
    return traced


def require_one_mean(outcome: Outcome) -> None:
    """Refuse a sum of several means. Raises `IllegalComposition`."""
    if len(outcome.means) > 1:
        raise IllegalComposition("a sum of several sl.Mean, whose weights must be known before its backward")


class Given:
    """What a traced function is given.

    Attributes:
        stored: this rank's buffers, by name.
    """

    def __init__(self, names: Sequence[str], tensors: Sequence[torch.Tensor], stands: Stands) -> None:
        self._rest, self._stands = iter(tensors), stands
        self.stored = {name: next(self._rest) for name in names}

    def tree(self, like: Tree) -> Tree:
        """The next input, with other tensors in the place of those of ``like``."""
        _, leaves, treedef = flatten(like)
        return unflatten(treedef, [next(self._rest) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves])

    def key(self, key: Key | None) -> Key | None:
        """What stands for a key."""
        return None if key is None else self._stands.key(key.slot)


def recorded(
    function: Callable[[Callable[[Surroundings], Runner]], Function],
    stored: Mapping[str, torch.Tensor],
    trees: Sequence[Tree],
    forward: Callable[[Function, Given], Any],
    backward: Callable[[Function, Any, Sequence[torch.Tensor], Spans], list[torch.Tensor]],
    lengths: Lengths,
    more: Sequence[torch.Tensor] = (),
) -> Traced:
    """Record forward and backward, whose nodes know their phase and block.

    Args:
        trees: the inputs of forward after ``stored``.
        lengths: of the tensors in them.
        backward: is given what ``forward`` returns, ``more``, and what to tell that gradients are reduced from here on;
            returns gradients of all trained buckets last.
    """
    fakes = Fakes(lengths)
    try:
        return _recorded(function, stored, trees, forward, backward, more, fakes)
    except CallsDiffer:  # a first call may fill caches, take over what was done to a module, or find equal lengths
        return _recorded(function, stored, trees, forward, backward, more, fakes)


def _recorded(
    function: Callable[[Callable[[Surroundings], Runner]], Function],
    stored: Mapping[str, torch.Tensor],
    trees: Sequence[Tree],
    forward: Callable[[Function, Given], Any],
    backward: Callable[[Function, Any, Sequence[torch.Tensor], Spans], list[torch.Tensor]],
    more: Sequence[torch.Tensor],
    fakes: Fakes,
) -> Traced:
    recorder, stands, names = Recorder(fakes), Stands(), list(stored)
    spans = Spans(recorder)
    loss = function(spans.runner)
    given = list(stored.values()), [tensor for tree in trees for tensor in tensors_of(tree)], more

    def run(*inputs: torch.Tensor) -> list[torch.Tensor]:
        with spans.noting():
            found = forward(loss, Given(names, inputs, stands))
        spans.turn()
        return backward(loss, found, inputs[len(inputs) - len(more) :], spans)

    with torch.enable_grad(), without_autocast_cache(), recorder.fakes.mode:
        inputs = recorder.inputs(*given)
        with without_random_numbers(), recorder:
            recorder.outputs(run(*inputs))
        again = Repeated(recorder, spans.turns[0])
        inputs = again.inputs(*given)
        with again:
            forward(loss, Given(names, inputs, Stands()))
    again.end()
    graph = recorder.graph
    _mark(graph, spans, len(stored))
    _require_draws_of_forward(graph)
    stands.made_inputs(graph)
    *_, output = graph.nodes
    first = len(output.args[0]) - len(loss.trained)
    return Traced(graph, recorder.constants, stands, first, loss.reached, loss.layer_tokens, [loss])


def _mark(graph: torch.fx.Graph, spans: Spans, stored: int) -> None:
    """Note each node's phase and block, whether it is part of a decision, its names, and whether it is an input of a block
    that is not in the memory of parameters, the graph's first inputs, ``stored`` of them."""
    roots, parameters = roots_of(graph), set(itertools.islice(graph.nodes, stored))
    phases, blocks = iter((BACKWARD, REDUCTION)), dict(spans.marks)
    phase, block, decided = FORWARD, None, False
    begins, ends = (set(nodes) for nodes in (zip(*spans.decisions) if spans.decisions else ((), ())))
    for node in graph.nodes:
        node.meta[PHASE], node.meta[DECIDED] = phase, decided
        node.meta.setdefault(BLOCK, block)
        if node in spans.names:
            node.meta[NAMES] = spans.names[node]
        if node in spans.given and roots[node] not in parameters:
            node.meta[GIVEN] = spans.given[node]
        decided = node in begins or (decided and node not in ends)
        if node in spans.turns:
            for _ in range(spans.turns.count(node)):
                phase, block = next(phases), None
        block = blocks.get(node, block) if phase == FORWARD else None


def _require_draws_of_forward(graph: torch.fx.Graph) -> None:
    """Refuse what torch's generators draw in backward: a checkpoint's second call, which puts them back before it, while a
    graph would draw on. Raises `IllegalComposition`."""
    if any(draws(node) and node.meta[PHASE] != FORWARD for node in graph.nodes):
        raise IllegalComposition(
            "backward draws from torch's generators, as torch.utils.checkpoint and tiles of tokens do with torch's dropout: "
            "a graph would draw other numbers there than forward. Use sl.dropout, or sl.remat() in the checkpoint's place"
        )


def form_of_tree(tree: Tree) -> tuple[TreeDef, tuple[Any, ...]]:
    """A tree's structure, and its leaves that are no tensors."""
    _, leaves, treedef = flatten(tree)
    return treedef, tuple(None if isinstance(leaf, torch.Tensor) else as_traced(leaf) for leaf in leaves)


def tensors_of(tree: Tree) -> list[torch.Tensor]:
    """The tensors of a tree."""
    return [leaf for leaf in flatten(tree)[1] if isinstance(leaf, torch.Tensor)]
