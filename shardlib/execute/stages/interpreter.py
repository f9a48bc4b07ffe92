"""Interprets a pipeline schedule: one rank's list of actions, one after the other.

Sends never wait, and a receive is posted one computation before its turn, so that what travels meanwhile is here
when it is needed. Within a rank stages hand their results over without a message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardlib.execute.executor import Executor
from shardlib.execute.gradients import Gradients
from shardlib.execute.handles import materialise
from shardlib.execute.losses import refuse_reentrant_checkpoints
from shardlib.execute.record import Record
from shardlib.execute.stages.messages import (
    PARTS,
    IncomingTensors,
    IncomingTree,
    Link,
    Sent,
    facts_of,
    finish,
    send_tensors,
    send_tree,
)
from shardlib.mesh.mesh import Mesh
from shardlib.plan.plan import Plan
from shardlib.schedules import Action, Kind, Schedule, peer, tag
from shardlib.sharded.tree import Sharded
from shardlib.tree import Tree, leaves_of, tree_map

# What a stage makes of a micro-batch: stage number, micro-batch, parameters, carry -> carry.
Compute = Callable[[int, int, Tree, Any], Any]


@dataclass
class Run:
    """One micro-batch in one stage, between its forward and the end of its backward.

    Attributes:
        halved: whether the first half of its backward is done; the rest is then empty.
    """

    executor: Executor
    inputs: list[torch.Tensor] = field(default_factory=list)
    outputs: list[torch.Tensor] = field(default_factory=list)
    seeds: list[torch.Tensor] = field(default_factory=list)
    halved: bool = False


class Stage:
    """One of this rank's stages: executors, one for each micro-batch that is under way at once.

    Args:
        halved: micro-batches whose backward goes in two halves; they make other exchanges than those whose does not.
    """

    def __init__(self, plan: Plan, mesh: Mesh, trained: bool, halved: Iterable[int] = ()) -> None:
        self.plan, self._mesh, self._trained = plan, mesh, trained
        self._halved = frozenset(halved)
        self.records = Record(plan, mesh), Record(plan, mesh)  # of whole backwards, and of halved ones
        self._idle: tuple[list[Executor], list[Executor]] = [], []
        self.runs: dict[int, Run] = {}

    def begin(self, microbatch: int) -> Run:
        kind = microbatch in self._halved
        idle = self._idle[kind]
        executor = idle.pop() if idle else Executor(self.plan, self._mesh, self._trained, self.records[kind])
        self.runs[microbatch] = Run(executor)
        return self.runs[microbatch]

    def end(self, microbatch: int) -> None:
        run = self.runs.pop(microbatch)
        run.executor.close()
        self._idle[microbatch in self._halved].append(run.executor)


@dataclass
class Position:
    """A rank's place among the stages.

    Attributes:
        stages: those on this rank.
        acknowledged: for each receive the sends that are then known to have arrived.
    """

    axis: str
    mesh: Mesh
    schedule: Schedule
    stages: dict[int, Stage]
    acknowledged: Mapping[Action, Sequence[Action]]

    def link(self, other: int) -> Link:
        return Link(self.mesh, self.axis, other)

    def ends(self, stage: int) -> bool:
        """Whether it is the last stage, whose result is the loss."""
        return stage == self.schedule.stages - 1


class Interpreter:
    """One step's state. Keys are (stage, micro-batch)."""

    def __init__(
        self,
        position: Position,
        params: Sharded,
        compute: Compute,
        gradients: dict[int, Gradients] | None,
        seed: Callable[[int], float] | None,
    ) -> None:
        self._position, self._params, self._compute = position, params, compute
        self._gradients, self._seed = gradients, seed
        self._schedule = position.schedule
        # What a stage's forward or backward takes (or its message, still under way), and what is to be sent.
        self._carries: dict[tuple[int, int], Any] = {}
        self._cotangents: dict[tuple[int, int], Any] = {}
        self._results: dict[tuple[int, int], Any] = {}
        self._newest: dict[int, IncomingTree] = {}  # by rank: the carry whose receive was posted last
        self._sent: dict[Action, list[Sent]] = {}
        self._do: dict[Kind, Callable[[Action], None]] = {
            Kind.F: self._forward if gradients is not None else self._forward_only,
            Kind.B: self._backward,
            Kind.I: self._inputs_gradient,
            Kind.W: self._weights_gradient,
            Kind.SEND_F: self._send_carry,
            Kind.SEND_B: self._send_gradients,
            Kind.RECV_F: self._receive,
            Kind.RECV_B: self._receive,
        }

    def run(self, order: Sequence[Action]) -> None:
        self._last = {
            action.stage: action.microbatch for action in order if action.kind is Kind.B or action.kind is Kind.W
        }
        try:
            for place, action in enumerate(order):
                if action.kind in _COMPUTE:
                    self._post_ahead(order[place + 1 :])
                self._do[action.kind](action)
            self._let_go(list(self._sent))
        finally:
            for stage in self._position.stages.values():
                for microbatch in list(stage.runs):
                    stage.end(microbatch)

    def _forward(self, action: Action) -> None:
        number, _, microbatch = action
        stage = self._position.stages[number]
        run = stage.begin(microbatch)
        carry = self._carry(action)
        run.inputs = differentiable(carry)
        assert self._gradients is not None
        result = run.executor.open(
            self._params,
            self._gradients[number],
            lambda tree: materialise(self._compute(number, microbatch, tree, carry)),
        )
        run.outputs = differentiable(result)
        if run.executor.record.order is None:
            for output in run.outputs:
                refuse_reentrant_checkpoints(output)
        run.executor.rest()
        self._pass_on(number, microbatch, result)

    def _forward_only(self, action: Action) -> None:
        number, _, microbatch = action
        stage = self._position.stages[number]
        carry = self._carry(action)
        result = stage.begin(microbatch).executor.forward(
            self._params, lambda tree: materialise(self._compute(number, microbatch, tree, carry))
        )
        stage.end(microbatch)
        self._pass_on(number, microbatch, result)

    def _carry(self, action: Action) -> Any:
        carry = self._carries.pop((action.stage, action.microbatch), None)
        if not isinstance(carry, IncomingTree):
            return carry
        carry = carry.wait()
        self._let_go(self._position.acknowledged.get(Action(action.stage, Kind.RECV_F, action.microbatch), ()))
        return carry

    def _pass_on(self, number: int, microbatch: int, result: Any) -> None:
        if number + 1 in self._position.stages:
            self._carries[number + 1, microbatch] = tree_map(fresh_leaf, result)
        elif number + 1 < self._schedule.stages:
            self._results[number, microbatch] = result

    def _send_carry(self, action: Action) -> None:
        result = self._results.pop((action.stage, action.microbatch))
        self._sent[action] = send_tree(self._link(action), result, self._tag(action))

    def _backward(self, action: Action) -> None:
        run = self._seeded(action)
        self._return(action, run, self._differentiate(action, run, run.inputs))

    def _inputs_gradient(self, action: Action) -> None:
        """The half of a backward that the stage before waits for. A stage without inputs does all of it in the other."""
        run = self._seeded(action)
        found: Sequence[torch.Tensor | None] = ()
        if run.inputs and run.outputs:
            found = run.executor.inputs_gradient(run.outputs, run.seeds, run.inputs)
            run.executor.rest()
        self._return(action, run, found or [None] * len(run.inputs))
        if found:
            run.halved, run.outputs, run.seeds, run.inputs = True, [], [], []

    def _weights_gradient(self, action: Action) -> None:
        run = self._position.stages[action.stage].runs[action.microbatch]
        if not run.halved:
            self._differentiate(action, run, ())
            return
        run.executor.weights_gradient(*self._sums(action))
        self._position.stages[action.stage].end(action.microbatch)

    def _seeded(self, action: Action) -> Run:
        """The run an action goes back through, with the gradients of its outputs."""
        key = action.stage, action.microbatch
        run = self._position.stages[action.stage].runs[action.microbatch]
        if self._position.ends(action.stage):
            assert self._seed is not None
            run.seeds = [torch.full_like(output, self._seed(action.microbatch)) for output in run.outputs]
        else:
            given = self._cotangents.pop(key)
            run.seeds = given.wait() if isinstance(given, IncomingTensors) else given
            self._let_go(self._position.acknowledged.get(Action(action.stage, Kind.RECV_B, action.microbatch), ()))
        return run

    def _differentiate(self, action: Action, run: Run, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor | None]:
        found = run.executor.differentiate(run.outputs, run.seeds, inputs, *self._sums(action))
        self._position.stages[action.stage].end(action.microbatch)
        return found

    def _sums(self, action: Action) -> tuple[Gradients, bool]:
        """Where a stage's gradients are summed, and whether these are the last."""
        assert self._gradients is not None
        return self._gradients[action.stage], self._last[action.stage] == action.microbatch

    def _return(self, action: Action, run: Run, found: Sequence[torch.Tensor | None]) -> None:
        """Keep the gradients of a run's inputs for the stage before; what was not used has the gradient zero."""
        number, _, microbatch = action
        whole = [torch.zeros_like(i) if grad is None else grad for grad, i in zip(found, run.inputs, strict=True)]
        if number - 1 in self._position.stages:
            self._cotangents[number - 1, microbatch] = whole
        elif number > 0:
            self._results[number, microbatch] = whole

    def _send_gradients(self, action: Action) -> None:
        found = self._results.pop((action.stage, action.microbatch))
        self._sent[action] = send_tensors(self._link(action), found, self._tag(action))

    def _post_ahead(self, rest: Sequence[Action]) -> None:
        """Start the receives that stand before the next computation, in order, as far as they can be known."""
        for action in rest:
            if action.kind in _COMPUTE or not self._postable(action):
                return
            if action.kind in _RECEIVES:
                self._receive(action)

    def _postable(self, action: Action) -> bool:
        """Whether a receive would not have to wait: for the header before it, or for the forward it belongs to."""
        if action.kind not in _RECEIVES:
            return True
        before = self._newest.get(peer(self._schedule, action))
        forwarded = action.kind is Kind.RECV_F or action.microbatch in self._position.stages[action.stage].runs
        return forwarded and (before is None or before.opened)

    def _receive(self, action: Action) -> None:
        """Post a receive, unless it is posted. Between two ranks they are posted in order: not every transport has tags."""
        key = action.stage, action.microbatch
        if key in (self._carries if action.kind is Kind.RECV_F else self._cotangents):
            return
        line = self._link(action)
        before = self._newest.get(line.peer)
        if before is not None:
            before.open()
        if action.kind is Kind.RECV_F:
            self._carries[key] = self._newest[line.peer] = IncomingTree(line, self._tag(action))
        else:
            outputs = self._position.stages[action.stage].runs[action.microbatch].outputs
            self._cotangents[key] = IncomingTensors(line, facts_of(outputs), self._tag(action))

    def _let_go(self, sends: Iterable[Action]) -> None:
        """Free the memory of messages that have been received; of those that may not have been, once they are."""
        for action in sends:
            finish(self._sent.pop(action, ()))

    def _link(self, message: Action) -> Link:
        return self._position.link(peer(self._schedule, message))

    def _tag(self, message: Action) -> int:
        return tag(self._schedule, message) * PARTS


_COMPUTE = (Kind.F, Kind.B, Kind.I, Kind.W)
_RECEIVES = (Kind.RECV_F, Kind.RECV_B)


def differentiable(tree: Tree) -> list[torch.Tensor]:
    return [leaf for leaf in leaves_of(tree) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


def fresh_leaf(leaf: Any) -> Any:
    """What a stage on the same rank starts from: the same data, in a graph of its own."""
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf
