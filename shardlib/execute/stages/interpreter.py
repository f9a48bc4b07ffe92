"""The interpreter of a pipeline schedule: runs one rank's list of actions, one after the other.

Sends never wait, and of each rank that sends to this one the next receive is posted as soon as the one before is taken, so
that messages overlap with computation. Stages on one rank pass results on without a message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardlib.execute.activation_offload import host_memory
from shardlib.execute.executor import Executor
from shardlib.execute.gathering import Record
from shardlib.execute.gradients import Gradients, Turn
from shardlib.execute.handles import materialise
from shardlib.execute.losses import refuse_reentrant_checkpoints
from shardlib.execute.stages.entry import entered
from shardlib.execute.stages.messages import (
    TAGS,
    Facts,
    IncomingTensors,
    IncomingTree,
    PeerLink,
    SentMessage,
    facts_of,
    finish,
    send_tensors,
    send_tree,
)
from shardlib.mesh.mesh import Mesh
from shardlib.plan.plan import Plan
from shardlib.plan.thinning import Thinned
from shardlib.schedules import Action, Kind, Schedule, peer, tag
from shardlib.sharded.tree import Sharded
from shardlib.tree import Tree, leaves_of, tree_map

# The computation of a stage: (stage number, micro-batch, parameters, carry) -> carry.
Compute = Callable[[int, int, Tree, Any], Any]


@dataclass
class Run:
    """One micro-batch in one stage, between its forward and the end of its backward.

    Attributes:
        executor: an `Executor`, or what stands for it where stages run as graphs.
        inputs: leaves that stand for the differentiable tensors of the incoming carry.
        outputs: differentiable tensors of the result.
        seeds: gradients of the outputs.
        halved: whether the first half of a split backward is done; inputs, outputs and seeds are then empty.
    """

    executor: Any
    inputs: list[torch.Tensor] = field(default_factory=list)
    outputs: list[torch.Tensor] = field(default_factory=list)
    seeds: list[torch.Tensor] = field(default_factory=list)
    halved: bool = False


class Stage:
    """One of this rank's stages, with an executor for each micro-batch in flight.

    Args:
        halved: micro-batches whose backward is split in two halves. Their exchanges differ from those of other
            micro-batches, so the two have separate records.

    Attributes:
        host: where inputs of blocks are kept, for all of its executors.
    """

    def __init__(self, plan: Plan, mesh: Mesh, trained: bool, halved: Iterable[int] = ()) -> None:
        self.plan, self._mesh, self._trained = plan, mesh, trained
        self._halved = frozenset(halved)
        self.records = Record(plan, mesh), Record(plan, mesh)  # of whole backwards, and of split ones
        self.host = host_memory(plan.step.remat, mesh) if trained else None
        self._idle: tuple[list[Executor], list[Executor]] = [], []
        self.runs: dict[int, Run] = {}

    def begin(self, microbatch: int) -> Run:
        kind = microbatch in self._halved
        idle = self._idle[kind]
        executor = idle.pop() if idle else self._executor(kind)
        self.runs[microbatch] = Run(executor)
        return self.runs[microbatch]

    def _executor(self, kind: bool) -> Executor:
        return Executor(self.plan, self._mesh, self._trained, self.records[kind], self.host)

    def end(self, microbatch: int) -> None:
        run = self.runs.pop(microbatch)
        run.executor.close()
        self._idle[microbatch in self._halved].append(run.executor)


@dataclass
class Position:
    """A rank's position in the pipeline.

    Attributes:
        axis: the stages' axis.
        stages: number -> `Stage`, or what stands for it, for the stages on this rank.
        acknowledged: receive -> sends of this rank that must have arrived when it completes.
    """

    axis: str
    mesh: Mesh
    schedule: Schedule
    stages: Mapping[int, Any]
    acknowledged: Mapping[Action, Sequence[Action]]

    def link(self, other: int, about: str) -> PeerLink:
        return PeerLink(self.mesh, self.axis, other, about)

    def is_last(self, stage: int) -> bool:
        """Whether a stage is the last one, whose result is the loss."""
        return stage == self.schedule.stages - 1


class Interpreter:
    """The state of one step. Keys of its dictionaries are (stage, micro-batch).

    Args:
        thinned: what each micro-batch leaves out, or None, where gradients are wanted.
    """

    def __init__(
        self,
        position: Position,
        params: Sharded,
        compute: Compute,
        gradients: Mapping[int, Any] | None,
        seed: Callable[[int], float] | None,
        thinned: Sequence[Thinned | None] = (),
    ) -> None:
        self._thinned = thinned
        self._position, self._params, self._compute = position, params, compute
        self._gradients, self._seed = gradients or {}, seed
        self._schedule = position.schedule
        # Inputs of forwards and of backwards (values, or messages under way), and results to be sent.
        self._carries: dict[tuple[int, int], Any] = {}
        self._cotangents: dict[tuple[int, int], Any] = {}
        self._results: dict[tuple[int, int], Any] = {}
        self._coming: dict[int, deque[Action]] = {}  # rank -> receives from it that are not posted
        self._posted: dict[int, Action] = {}  # rank -> the receive from it that was posted last
        self._newest: dict[int, IncomingTree] = {}  # rank -> the carry from it whose receive was posted last
        self._gone: dict[int, list[Facts]] = {}  # rank -> the carry that was sent to it last
        self._sent: dict[Action, list[SentMessage]] = {}
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
        for action in order:
            if action.kind in _RECEIVES:
                self._coming.setdefault(peer(self._schedule, action), deque()).append(action)
        try:
            for action in order:
                if action.kind in _COMPUTE:
                    self._post_ahead()
                    self._land()
                self._do[action.kind](action)
            self._let_go(list(self._sent))
        finally:
            for stage in self._position.stages.values():
                for microbatch in list(stage.runs):
                    stage.end(microbatch)

    def _forward(self, action: Action) -> None:
        number, _, microbatch = action
        stage = self._position.stages[number]
        arrived = self._carry(action)  # before the run begins, from whose outputs a receive follows
        result = self._result(action, stage.begin(microbatch), arrived)
        self._pass_on(number, microbatch, result)

    def _result(self, action: Action, run: Run, arrived: Any) -> Any:
        """The result of a forward, of whose run inputs and outputs are noted."""
        number, _, microbatch = action
        carry, run.inputs = entered(arrived)
        result = run.executor.open(
            self._params,
            self._gradients[number],
            lambda tree: materialise(self._compute(number, microbatch, tree, carry)),
            self._thinned[microbatch],
        )
        run.outputs = differentiable(result)
        if run.executor.record.order is None:
            for output in run.outputs:
                refuse_reentrant_checkpoints(output)
        run.executor.rest()
        return result

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
        carry.open()
        self._post_ahead()
        carry = carry.wait()
        self._let_go(self._position.acknowledged.get(Action(action.stage, Kind.RECV_F, action.microbatch), ()))
        return carry

    def _pass_on(self, number: int, microbatch: int, result: Any) -> None:
        if number + 1 in self._position.stages:
            self._carries[number + 1, microbatch] = tree_map(fresh_leaf, result)
        elif number + 1 < self._schedule.stages:
            self._results[number, microbatch] = result

    def _send_carry(self, action: Action) -> None:
        result, link = self._results.pop((action.stage, action.microbatch)), self._link(action)
        self._sent[action] = send_tree(link, result, self._tag(action), self._gone.get(link.peer, ()))
        self._gone[link.peer] = facts_of([leaf for leaf in leaves_of(result) if isinstance(leaf, torch.Tensor)])

    def _backward(self, action: Action) -> None:
        run = self._seeded(action)
        self._return(action, run, self._whole(action, run))
        self._position.stages[action.stage].end(action.microbatch)

    def _inputs_gradient(self, action: Action) -> None:
        """Run the first half of a backward. A stage without inputs runs the whole backward in the second half."""
        run = self._seeded(action)
        grads: Sequence[torch.Tensor | None] = ()
        if run.inputs and run.outputs:
            grads = self._first_half(run)
        self._return(action, run, grads or [None] * len(run.inputs))
        if grads:
            run.halved, run.outputs, run.seeds, run.inputs = True, [], [], []

    def _weights_gradient(self, action: Action) -> None:
        run = self._position.stages[action.stage].runs[action.microbatch]
        if run.halved:
            self._second_half(action, run)
        else:
            self._whole(action, run)
        self._position.stages[action.stage].end(action.microbatch)

    def _seeded(self, action: Action) -> Run:
        """The run of a backward action, with its seeds."""
        key = action.stage, action.microbatch
        run = self._position.stages[action.stage].runs[action.microbatch]
        if self._position.is_last(action.stage):
            assert self._seed is not None
            run.seeds = [torch.full_like(output, self._seed(action.microbatch)) for output in run.outputs]
        else:
            given = self._cotangents.pop(key)
            self._post_ahead()
            run.seeds = given.wait() if isinstance(given, IncomingTensors) else given
            self._let_go(self._position.acknowledged.get(Action(action.stage, Kind.RECV_B, action.microbatch), ()))
        return run

    def _whole(self, action: Action, run: Run) -> Sequence[torch.Tensor | None]:
        """The gradients of a run's inputs; those of parameters are added to the stage's sums."""
        return run.executor.differentiate(run.outputs, run.seeds, run.inputs, *self._sums(action))

    def _first_half(self, run: Run) -> Sequence[torch.Tensor | None]:
        """The gradients of a run's inputs, alone."""
        return run.executor.inputs_gradient(run.outputs, run.seeds, run.inputs)

    def _second_half(self, action: Action, run: Run) -> None:
        """Add the gradients of parameters to the stage's sums."""
        run.executor.weights_gradient(*self._sums(action))

    def _land(self) -> None:
        """Wait for the reductions of the stages' gradients: after what the stage before waits for is sent to it."""
        for sums in self._gradients.values():
            sums.land()

    def _sums(self, action: Action) -> tuple[Gradients, Turn]:
        """The sums of a stage's gradients, and this action's turn to add to them."""
        last = self._last[action.stage] == action.microbatch
        return self._gradients[action.stage], Turn(action.microbatch, last)

    def _return(self, action: Action, run: Run, grads: Sequence[torch.Tensor | None]) -> None:
        """Keep the gradients of a run's inputs for the stage before; zeros for unused inputs."""
        number, _, microbatch = action
        filled = [torch.zeros_like(i) if grad is None else grad for grad, i in zip(grads, run.inputs, strict=True)]
        if number - 1 in self._position.stages:
            self._cotangents[number - 1, microbatch] = filled
        elif number > 0:
            self._results[number, microbatch] = filled

    def _send_gradients(self, action: Action) -> None:
        grads = self._results.pop((action.stage, action.microbatch))
        self._sent[action] = send_tensors(self._link(action), grads, self._tag(action))

    def _post_ahead(self) -> None:
        """Post the next receive from each rank whose messages so far are taken."""
        for rank, coming in self._coming.items():
            if coming and not self._untaken(rank) and self._postable(rank, coming[0]):
                self._receive(coming[0])

    def _untaken(self, rank: int) -> bool:
        action = self._posted.get(rank)
        return action is not None and (action.stage, action.microbatch) in self._arriving(action)

    def _postable(self, rank: int, action: Action) -> bool:
        """Whether a receive can be posted without waiting for an earlier carry's header, or for its own stage's forward."""
        before = self._newest.get(rank)
        forwarded = action.kind is Kind.RECV_F or action.microbatch in self._position.stages[action.stage].runs
        return forwarded and (before is None or before.opened)

    def _receive(self, action: Action) -> None:
        """Post a receive, once. Receives from one rank are posted in order, since not every transport has tags."""
        link = self._link(action)
        coming = self._coming[link.peer]
        if not coming or coming[0] != action:
            return
        self._posted[link.peer] = coming.popleft()
        before = self._newest.get(link.peer)
        expected = () if before is None else before.open()
        key, arriving = (action.stage, action.microbatch), self._arriving(action)
        if action.kind is Kind.RECV_F:
            arriving[key] = self._newest[link.peer] = IncomingTree(link, self._tag(action), expected)
        else:
            outputs = self._position.stages[action.stage].runs[action.microbatch].outputs
            arriving[key] = IncomingTensors(link, facts_of(outputs), self._tag(action))

    def _arriving(self, action: Action) -> dict[tuple[int, int], Any]:
        """Where what a receive brings is kept."""
        return self._carries if action.kind is Kind.RECV_F else self._cotangents

    def _let_go(self, sends: Iterable[Action]) -> None:
        """Free the memory of sent messages; waits for those that have not been received."""
        for action in sends:
            finish(self._sent.pop(action, ()))

    def _link(self, message: Action) -> PeerLink:
        return self._position.link(peer(self._schedule, message), _about(message))

    def _tag(self, message: Action) -> int:
        return tag(self._schedule, message) * TAGS


def _about(message: Action) -> str:
    """What a message holds: the same for its sender and its receiver."""
    before = message.stage - (message.kind in (Kind.RECV_F, Kind.SEND_B))
    if message.kind in (Kind.SEND_F, Kind.RECV_F):
        return f"activations from stage {before} to {before + 1}"
    return f"gradients from stage {before + 1} to {before}"


_COMPUTE = (Kind.F, Kind.B, Kind.I, Kind.W)
_RECEIVES = (Kind.RECV_F, Kind.RECV_B)


def differentiable(tree: Tree) -> list[torch.Tensor]:
    """The tensors of a pytree that require gradients."""
    return [leaf for leaf in leaves_of(tree) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


def fresh_leaf(leaf: Any) -> Any:
    """A leaf of a carry for the next stage on the same rank: the same data, as a leaf of a new graph."""
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf
