"""The trace of one micro-batch: loss, backward and exchanges as one graph, on fake tensors."""

from __future__ import annotations

import itertools
import sys
from bisect import bisect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from shardlib.common._compat import (
    next_number,
    number_of_derivative,
    pytree,
    storage_id,
    without_autocast_cache,
)
from shardlib.common.environment import Decision, within
from shardlib.errors import IllegalComposition
from shardlib.execute.activation_offload import may_move
from shardlib.execute.context import Surroundings
from shardlib.execute.graph.keys import Stands
from shardlib.execute.graph.nodes import (
    BACKWARD,
    BLOCK,
    DECIDED,
    FORWARD,
    GIVEN,
    NAMES,
    PHASE,
    REDUCTION,
    changes,
    draws,
    roots_of,
)
from shardlib.execute.graph.outside import CallsDiffer, Outside, WithoutReads, without_random_numbers, without_seeds
from shardlib.execute.graph.recorder import Fakes, Lengths, Recorder, as_traced
from shardlib.execute.losses import Outcome, read_loss, require_gradient
from shardlib.execute.stages.one import detached
from shardlib.execute.values.function import Function, gradients_of
from shardlib.nn.blocks import Runner
from shardlib.nn.functional import Mean
from shardlib.plan.drops import DropPlan
from shardlib.rng import Key
from shardlib.tree import Tree, TreeDef, flatten, tensors_of, unflatten


class TreeForm(NamedTuple):
    """A tree's structure, and its leaves that are no tensors; None in the place of those that are."""

    structure: TreeDef
    others: tuple[Any, ...]

    @staticmethod
    def of(tree: Tree) -> TreeForm:
        _, leaves, structure = flatten(tree)
        return TreeForm(
            structure, tuple(None if isinstance(leaf, torch.Tensor) else as_traced(leaf) for leaf in leaves)
        )

    def filled(self, tensors: Iterator[torch.Tensor]) -> Tree:
        """The tree with the next tensors."""
        return unflatten(self.structure, [next(tensors) if other is None else other for other in self.others])


@dataclass(frozen=True)
class OutcomeForm:
    """What a graph's first results are made into.

    Attributes:
        terms: the number of means in the loss.
        weighted: whether the loss is a `Mean`, or a sum of means.
    """

    terms: int
    weighted: bool
    aux: TreeForm
    buffers: TreeForm

    @staticmethod
    def of(outcome: Outcome) -> tuple[OutcomeForm, list[torch.Tensor]]:
        """The form of an outcome, and its tensors."""
        numbers = [number for mean in outcome.means for number in mean]
        form = OutcomeForm(len(outcome.means), outcome.weighted, TreeForm.of(outcome.aux), TreeForm.of(outcome.buffers))
        return form, [*numbers, *tensors_of(outcome.aux), *tensors_of(outcome.buffers)]

    def outcome(self, outputs: Sequence[torch.Tensor], held: Collection[int]) -> tuple[Outcome, Sequence[torch.Tensor]]:
        """The outcome, and the outputs after its own. ``held``: the identities of the storages of parameters."""
        means = tuple(Mean(*outputs[2 * term : 2 * term + 2]) for term in range(self.terms))
        rest = iter(outputs[2 * self.terms :])
        outcome = Outcome(means, self.weighted, self.aux.filled(rest), self.buffers.filled(rest))
        return detached(outcome, lambda tensor: storage_id(tensor.untyped_storage()) in held), list(rest)


@dataclass
class Traced:
    """A graph and what its inputs and outputs are.

    Attributes:
        graph: takes this rank's buffers in the plan's order, the tensors of the loss's buffers and of the batch, what codecs
            keep, the number from which backward starts, what draws take, and what `land` calls; returns totals and weights,
            the tensors of aux and buffers, a gradient for each trained bucket, and what codecs keep then. (A pipeline's stage
            takes and returns others: see `shardlib.execute.graph.stage`.)
        constants: the tensors that the graph has by name.
        stands: of the draws.
        gradients: the number of the first gradient among what the graph returns.
        reached: the paths of leaves that have a gradient.
        layer_tokens: tokens that layers see, where the plan leaves out some.
        links: what the graph's exchanges go along; they live as long as it does.
        form: of the results.
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


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch to be traced.

    Attributes:
        function: makes the loss, or a pipeline's stage, as a function of shards, given how its blocks run.
        reads: the user's functions in it.
        stored: this rank's buffers, by name.
        trees: what the function is given besides parameters.
        lengths: of the tensors in ``trees``.
        key: the micro-batch's key.
        drops: what it leaves out.
        named: its name, for messages.
    """

    function: Callable[[Callable[[Surroundings], Runner]], Function]
    reads: Any
    stored: Mapping[str, torch.Tensor]
    trees: Sequence[Tree]
    lengths: Lengths
    key: Key | None
    drops: DropPlan | None
    named: str


class GivenInputs:
    """What a traced function is given: a `MicroBatch` of the graph's inputs, and those that follow on its own."""

    def __init__(self, of: MicroBatch, inputs: Sequence[torch.Tensor], stands: Stands) -> None:
        rest = iter(inputs)
        self.stored: dict[str, Any] = {name: next(rest) for name in of.stored}
        self.trees: list[Tree] = []
        for tree in of.trees:
            _, leaves, treedef = flatten(tree)
            filled = [next(rest) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            self.trees.append(unflatten(treedef, filled))
        self.key: Key | None = None if of.key is None else stands.key(of.key.slot)
        self.more: list[Any] = list(rest)


class TraceRecorder(Recorder):
    """A recorder whose nodes know their phase, their block, and whether they are part of a decision.

    Attributes:
        given: the nodes that are inputs of blocks and of checkpoints; see `GIVEN`.
    """

    def __init__(self, fakes: Fakes) -> None:
        super().__init__(fakes)
        self.given: dict[Node, tuple[int, int | None]] = {}
        self._phase, self._decides = FORWARD, False
        self._block: int | None = None  # that runs in forward
        # Of the numbers that autograd's nodes have: each block's first, and that of what follows on the block.
        self._spans: list[tuple[int, int]] = []
        self._entered, self._inside = 0, False  # blocks and checkpoints so far, and whether a block runs

    def turn(self) -> None:
        """Begin the next phase."""
        self._phase, self._block = (BACKWARD if self._phase == FORWARD else REDUCTION), None

    def _node(self, op: str, target: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Node:
        node = super()._node(op, target, args, kwargs)
        node.meta[PHASE], node.meta[DECIDED] = self._phase, self._decides
        node.meta[BLOCK] = self._differentiated() if self._phase == BACKWARD else self._block
        return node

    def _differentiated(self) -> int | None:
        """The block whose derivative autograd computes now."""
        number = number_of_derivative()
        place = bisect(self._spans, (number, sys.maxsize)) - 1
        return place if place >= 0 and number < self._spans[place][1] else None

    def runner(self, surroundings: Surroundings) -> Runner:
        """How blocks run."""

        def run(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if self._inside:
                return fn(*args, **kwargs)
            number = len(self._spans)
            self._enter(pytree.tree_leaves((args, kwargs)), number)
            self._inside, self._block, first = True, number, next_number()
            try:
                with within(names=self._name):
                    return fn(*args, **kwargs)
            finally:
                self._inside, self._block = False, None
                self._spans.append((first, next_number()))

        return run

    def keep(self, fn: Callable[..., Any], args: Sequence[Any], has_context: bool) -> tuple[Any, Sequence[Any]]:
        """See `shardlib.execute.activation_offload.ActivationKeeper`: checkpoints of the model's own."""
        if not self._inside and torch.is_grad_enabled():
            self._enter(args, None)
        return fn, args

    def _enter(self, args: Sequence[Any], block: int | None) -> None:
        """Note the inputs of a block or of a checkpoint."""
        for arg in filter(may_move, args):
            if node := self.node_of(arg):
                self.given.setdefault(node, (self._entered, block))
        self._entered += 1

    def _name(self, x: torch.Tensor, name: str) -> torch.Tensor:
        if node := self.node_of(x):
            node.meta[NAMES] = (*node.meta.get(NAMES, ()), name)
        return x

    def _decide(self, decide: Decision) -> list[torch.Tensor]:
        before, self._decides = self._decides, True
        try:
            return decide()
        finally:
            self._decides = before

    @contextmanager
    def noting(self, follow: Any) -> Iterator[None]:
        """A context in which decisions (`shardlib.common.environment`), and inputs of checkpoints, are noted.

        Args:
            follow: a context around the calls of modules.
        """
        with within(decides=self._decide, keeper=self, follows=follow):
            yield


def trace(
    of: MicroBatch, kept: Mapping[str, torch.Tensor], with_buffers: bool, reduces: bool, device: torch.device
) -> Traced:
    """Trace forward and backward of a loss on ``device``.

    Args:
        kept: what codecs keep, by name.
        with_buffers: whether the loss is given buffers, before its batch.
        reduces: whether gradients are summed over ranks as the optimizer holds them, or as they are accumulated.
    """
    form: list[OutcomeForm] = []

    def forward(loss: Function, given: GivenInputs) -> tuple[Outcome, dict[str, torch.Tensor]]:
        slots = {name: slot.requires_grad_() for name, slot in loss.slots().items()}
        result = loss(given.stored, slots, *given.trees, key=given.key, drops=of.drops)
        return read_loss(result, with_buffers), slots

    def backward(loss: Function, found: Any, more: list[torch.Tensor], recorder: TraceRecorder) -> list[torch.Tensor]:
        outcome, slots = found
        *held, seed = more
        keeping = dict(zip(kept, held, strict=True))
        require_gradient(outcome, None, of.named)
        require_one_mean(outcome)
        gradients = gradients_of([mean.total for mean in outcome.means], [seed], slots)
        recorder.turn()
        gradients = loss.accumulated(gradients, keeping)
        if reduces:
            gradients = loss.reduced(gradients, keeping)
        made, numbers = OutcomeForm.of(outcome)
        form.append(made)
        return [*numbers, *gradients.values(), *keeping.values()]

    seed = torch.ones((), dtype=torch.float64, device=device)
    traced = recorded(of, forward, backward, [*kept.values(), seed])
    traced.gradients -= len(kept)
    traced.form = form[-1]
    return traced


def require_one_mean(outcome: Outcome) -> None:
    """Refuse a sum of several means. Raises `IllegalComposition`."""
    if len(outcome.means) > 1:
        raise IllegalComposition("a sum of several sl.Mean, whose weights must be known before its backward")


def recorded(
    of: MicroBatch,
    forward: Callable[[Function, GivenInputs], Any],
    backward: Callable[[Function, Any, list[torch.Tensor], TraceRecorder], list[torch.Tensor]],
    more: Sequence[torch.Tensor] = (),
) -> Traced:
    """Record forward and backward.

    Args:
        backward: is given what ``forward`` returns, ``more``, and what to tell that gradients are reduced from here on;
            returns gradients of all trained buckets last.
    """
    fakes = Fakes(of.lengths)
    try:
        return _recorded(of, forward, backward, more, fakes)
    except CallsDiffer:  # a first call may fill caches, take over what was done to a module, or find equal lengths
        return _recorded(of, forward, backward, more, fakes)


def _recorded(of: MicroBatch, forward: Any, backward: Any, more: Sequence[torch.Tensor], fakes: Fakes) -> Traced:
    recorder, stands, outside = TraceRecorder(fakes), Stands(), Outside(of.reads)
    loss = of.function(recorder.runner)
    device = loss.mesh.device
    given = list(of.stored.values()), tensors_of(of.trees), more
    try:
        with torch.enable_grad(), without_autocast_cache(), fakes.mode:
            inputs = recorder.inputs(*given)
            with without_random_numbers(), recorder:
                now = GivenInputs(of, inputs, stands)
                with recorder.noting(outside.follow), WithoutReads(), without_seeds(recorder, device):
                    found = forward(loss, now)
                before = outside.values()
                recorder.turn()
                recorder.outputs(backward(loss, found, now.more, recorder))
                del found, now
            after = outside.values()
            again = Repeated(recorder)
            inputs = again.inputs(*given)
            with again, WithoutReads(), without_seeds(again, device):
                forward(loss, GivenInputs(of, inputs, Stands()))
        again.end()
        outside.require_same(before, after)
        outside.require_same(after, outside.values())
        outside.tell(again)
    finally:
        outside.restore()
    graph = recorder.graph
    roots, parameters = roots_of(graph), set(itertools.islice(graph.nodes, len(of.stored)))
    for node, noted in recorder.given.items():
        if roots[node] not in parameters:  # which stay as they are
            node.meta[GIVEN] = noted
    if any(draws(node) and node.meta[PHASE] != FORWARD for node in graph.nodes):
        raise IllegalComposition(
            "in a graph backward would draw other numbers than forward. Use sl.dropout, or sl.remat() for the "
            "checkpoint"
        )
    stands.made_inputs(graph)
    *_, output = graph.nodes
    first = len(output.args[0]) - len(loss.trained)
    return Traced(graph, recorder.constants, stands, first, loss.reached, loss.layer_tokens, [loss])


# A look at whether a loss function computes the same when it is called again, as a graph of it would.
# What it takes from no tensor is a constant of a graph: Python's and NumPy's random numbers, and a count of its own calls.


class Repeated(Recorder):
    """A recorder of a function's second call, which refuses what differs from the first.

    Raises:
        CallsDiffer: names the first operation that differs.
    """

    def __init__(self, first: TraceRecorder) -> None:
        super().__init__(first.fakes)
        self._first = first
        self._nodes = iter([node for node in first.graph.nodes if node.meta.get(PHASE) == FORWARD])
        self._fixed = set[Node]()  # what is computed from constants, and may be in a cache by now
        for node in first.graph.nodes:
            computed = node.op in ("get_attr", "call_function") and self._fixed.issuperset(node.all_input_nodes)
            if computed and not (draws(node) or changes(node)):
                self._fixed.add(node)

    def is_known(self, made_by: Any, node: Any) -> bool:
        return made_by is self or (made_by is self._first and node in self._fixed)

    def _next(self) -> Node | None:
        return next(self._nodes, None)

    def _node(self, op: str, target: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Node:
        given = [args, kwargs or {}]
        before = first = self._next()
        while before and (before.target != target or not _same([before.args, before.kwargs], given)):
            before = self._next() if before in self._fixed else None
        if before is None:
            raise _other(_told(first), f"{target}({', '.join(map(str, args))})")
        return before

    def end(self) -> None:
        """Refuse a call that ended before the first one, or that read other constants."""
        for before in self._nodes:
            if before not in self._fixed:
                raise _other(_told(before), "nothing")
        for name, now in self.constants.items():
            known = self._first.constants[name]
            if known is not now and not (known.shape == now.shape and bool(((known == now) | (now != now)).all())):
                raise _other(f"the constant {known}", str(now))


def _same(before: Any, now: Any) -> bool:
    """Whether two arguments are the same."""
    if isinstance(before, Node):
        return before is now
    if isinstance(before, dict):
        return _same(list(before.items()), list(now.items()))
    if isinstance(before, tuple | list):
        return len(before) == len(now) and all(map(_same, before, now))
    return type(before) is type(now) and (before == now or repr(before) == repr(now))


def _told(node: Node | None) -> str:
    return "nothing" if node is None else f"{node.target}({', '.join(map(str, node.args))})"


def _other(before: str, now: str) -> CallsDiffer:
    return CallsDiffer(
        f"the loss function computes something else when called again ({before}, and then {now}). Put what changes "
        "into the batch: torch.tensor(count)"
    )
