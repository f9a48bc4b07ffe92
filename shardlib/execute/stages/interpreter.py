"""The interpreter of a pipeline schedule: runs one rank's list of actions, one after the other.

Sends never wait, and of each rank that sends to this one the next receive is posted as soon as the one before is taken, so
that messages overlap with computation. Stages on one rank pass results on without a message.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardlib.execute.activation_offload import host_memory
from shardlib.execute.executor import Executor
from shardlib.execute.gathering import Record
from shardlib.execute.gradients import Gradients, Turn
from shardlib.execute.handles import materialise
from shardlib.execute.losses import refuse_reentrant_checkpoints
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
from shardlib.schedules.actions import COMPUTE
from shardlib.sharded.tree import Sharded
from shardlib.tree import Tree, tensors_of, tree_map

Grads = Sequence[torch.Tensor | None]  # None for what nothing depends on


class Run(ABC):
    """One micro-batch in one stage, between its forward and the end of its backward.

    Attributes:
        inputs: leaves without memory that stand for the differentiable tensors of the incoming carry.
        outputs: differentiable tensors of the result, for as long as backward needs them.
        halved: whether the first half of a split backward is done.
    """

    def __init__(self) -> None:
        self.inputs: list[torch.Tensor] = []
        self.outputs: list[torch.Tensor] = []
        self.halved = False
        self._seeds: Sequence[torch.Tensor] = ()  # for the second half, where it is all of backward

    @abstractmethod
    def forward(self, arrived: Tree) -> Tree:
        """The stage's result for a carry; sets `inputs` and `outputs`."""

    @abstractmethod
    def backward(self, seeds: Sequence[torch.Tensor]) -> Grads:
        """The gradients of `inputs`; those of parameters are added to the stage's sums."""

    @abstractmethod
    def _first_half(self, seeds: Sequence[torch.Tensor]) -> Grads:
        """The gradients of `inputs` alone."""

    @abstractmethod
    def _second_half(self) -> None:
        """Add the gradients of parameters to the stage's sums."""

    @abstractmethod
    def close(self) -> None:
        """Free what the run holds."""

    def inputs_gradient(self, seeds: Sequence[torch.Tensor]) -> Grads:
        """The first half of a backward. A stage without inputs runs the whole backward in the second half."""
        if not (self.inputs and self.outputs):
            self._seeds = seeds
            return [None] * len(self.inputs)
        grads = self._first_half(seeds)
        self.halved, self.outputs = True, []
        return grads

    def weights_gradient(self) -> None:
        """The second half of a backward."""
        if self.halved:
            self._second_half()
        else:
            self.backward(self._seeds)


class EagerRun(Run):
    """A run by an executor.

    Args:
        compute: the stage, of the executor, parameters and a carry.
        gradients: the stage's sums; None for a forward alone, without gradients.
        turn: of this micro-batch to add to them.
        thinned: what the micro-batch leaves out.
        idle: where the executor goes in the end.
    """

    def __init__(
        self,
        executor: Executor,
        params: Sharded,
        compute: Callable[[Executor, Tree, Tree], Tree],
        gradients: Gradients | None,
        turn: Turn,
        thinned: Thinned | None,
        idle: list[Executor],
    ) -> None:
        super().__init__()
        self.executor, self._params, self._compute, self._thinned = executor, params, compute, thinned
        self._gradients: Any = gradients
        self._turn, self._idle = turn, idle

    def forward(self, arrived: Tree) -> Tree:
        if self._gradients is None:
            return self.executor.forward(self._params, lambda tree: self._computed(tree, arrived))
        result = self.open(self.enter(arrived))
        self.executor.rest()
        return result

    def enter(self, arrived: Tree) -> Tree:
        """The carry for the stage's function.

        As its leaves have no memory, those alone who need a carry for backward keep it: a store of blocks' inputs may take it
        elsewhere.
        """

        def entered(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or not value.requires_grad:
                return value
            self.inputs.append(without_memory(value).requires_grad_())
            return _CarryEntry.apply(self.inputs[-1], value.detach())

        return tree_map(entered, arrived)

    def open(self, carry: Tree) -> Tree:
        """The stage's result, with the graph for backward."""
        result = self.executor.open(
            self._params, self._gradients, lambda tree: self._computed(tree, carry), self._thinned
        )
        self.outputs = differentiable(result)
        if self.executor.record.order is None:
            for output in self.outputs:
                refuse_reentrant_checkpoints(output)
        return result

    def _computed(self, tree: Tree, carry: Tree) -> Tree:
        return materialise(self._compute(self.executor, tree, carry))

    def backward(self, seeds: Sequence[torch.Tensor]) -> Grads:
        return self.executor.differentiate(self.outputs, seeds, self.inputs, self._gradients, self._turn)

    def _first_half(self, seeds: Sequence[torch.Tensor]) -> Grads:
        return self.executor.inputs_gradient(self.outputs, seeds, self.inputs)

    def _second_half(self) -> None:
        self.executor.weights_gradient(self._gradients, self._turn)

    def close(self) -> None:
        self.executor.close()
        self._idle.append(self.executor)


class _CarryEntry(torch.autograd.Function):
    """The values of a carry, whose gradient goes to a leaf without memory."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return values.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class Stage:
    """One of this rank's stages, with an executor for each micro-batch in flight.

    Args:
        order: the rank's actions. Split backwards exchange otherwise than whole ones, and have a record of their own.

    Attributes:
        host: where inputs of blocks are kept, for all of its executors.
    """

    def __init__(self, plan: Plan, mesh: Mesh, trained: bool, number: int, order: Iterable[Action]) -> None:
        self.plan, self._mesh, self._trained = plan, mesh, trained
        own = [action for action in order if action.stage == number]
        self._halved = {action.microbatch for action in own if action.kind is Kind.I}
        self._last = [action.microbatch for action in own if action.kind in (Kind.B, Kind.W)][-1]
        self.records = Record(plan, mesh), Record(plan, mesh)  # of whole backwards, and of split ones
        self.host = host_memory(plan.step.remat, mesh) if trained else None
        self._idle: tuple[list[Executor], list[Executor]] = [], []

    def begin(
        self,
        microbatch: int,
        params: Sharded,
        compute: Callable[[Executor, Tree, Tree], Tree],
        gradients: Gradients | None = None,
        thinned: Thinned | None = None,
    ) -> EagerRun:
        """The run of a micro-batch; arguments as of `EagerRun`."""
        kind = microbatch in self._halved
        idle, record = self._idle[kind], self.records[kind]
        executor = idle.pop() if idle else Executor(self.plan, self._mesh, self._trained, record, self.host)
        turn = Turn(microbatch, microbatch == self._last)
        return EagerRun(executor, params, compute, gradients, turn, thinned, idle)


@dataclass
class Position:
    """A rank's position in the pipeline.

    Attributes:
        axis: the stages' axis.
        stages: the numbers of the stages on this rank.
        acknowledged: receive -> sends of this rank that must have arrived when it completes.
    """

    axis: str
    mesh: Mesh
    schedule: Schedule
    stages: Collection[int]
    acknowledged: Mapping[Action, Sequence[Action]]

    def link(self, other: int, about: str) -> PeerLink:
        return PeerLink(self.mesh, self.axis, other, about)

    def is_last(self, stage: int) -> bool:
        """Whether a stage is the last one, whose result is the loss."""
        return stage == self.schedule.stages - 1


class Interpreter:
    """The state of one step. Keys of its dictionaries are (stage, micro-batch).

    Args:
        begin: begins the run of a micro-batch in a stage.
        seed: the gradient of the last stage's result, by micro-batch.
        settle: waits for the reductions of gradients under way.
    """

    def __init__(
        self,
        position: Position,
        begin: Callable[[int, int], Run],
        seed: Callable[[int], float] = lambda _: 1.0,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        self._position, self._begin, self._seed, self._settle = position, begin, seed, settle
        self._schedule = position.schedule
        self._runs: dict[tuple[int, int], Run] = {}
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
            Kind.F: self._forward,
            Kind.B: self._backward,
            Kind.I: self._inputs_gradient,
            Kind.W: self._weights_gradient,
            Kind.SEND_F: self._send_carry,
            Kind.SEND_B: self._send_gradients,
            Kind.RECV_F: self._receive,
            Kind.RECV_B: self._receive,
        }

    def run(self, order: Sequence[Action]) -> None:
        for action in order:
            if action.kind in (Kind.RECV_F, Kind.RECV_B):
                self._coming.setdefault(peer(self._schedule, action), deque()).append(action)
        try:
            for action in order:
                if action.kind in COMPUTE:
                    self._post_ahead()
                    self._settle()  # after what the stage before waits for is sent to it
                self._do[action.kind](action)
            self._let_go(list(self._sent))
        finally:
            for run in self._runs.values():
                run.close()

    def _forward(self, action: Action) -> None:
        number, _, microbatch = action
        arrived = self._arrived(action, Kind.RECV_F)  # before the run begins, from whose outputs a receive follows
        run = self._runs[number, microbatch] = self._begin(number, microbatch)
        result = run.forward(arrived)
        if number + 1 in self._position.stages:
            self._carries[number + 1, microbatch] = tree_map(fresh_leaf, result)
        elif number + 1 < self._schedule.stages:
            self._results[number, microbatch] = result

    def _backward(self, action: Action) -> None:
        run = self._runs[action.stage, action.microbatch]
        self._return(action, run, run.backward(self._seeds(action, run)))
        self._end(action)

    def _inputs_gradient(self, action: Action) -> None:
        run = self._runs[action.stage, action.microbatch]
        self._return(action, run, run.inputs_gradient(self._seeds(action, run)))

    def _weights_gradient(self, action: Action) -> None:
        self._runs[action.stage, action.microbatch].weights_gradient()
        self._end(action)

    def _end(self, action: Action) -> None:
        self._runs.pop((action.stage, action.microbatch)).close()

    def _arrived(self, action: Action, kind: Kind) -> Any:
        """What a forward, or a backward, is given by another stage; None for the first one's carry."""
        receive = Action(action.stage, kind, action.microbatch)
        arrived = self._arriving(receive).pop((action.stage, action.microbatch), None)
        if isinstance(arrived, IncomingTree):
            arrived.open()
        self._post_ahead()
        if isinstance(arrived, IncomingTree | IncomingTensors):
            arrived = arrived.wait()
        self._let_go(self._position.acknowledged.get(receive, ()))
        return arrived

    def _seeds(self, action: Action, run: Run) -> Sequence[torch.Tensor]:
        """The gradients of a run's outputs."""
        if self._position.is_last(action.stage):
            return [torch.full_like(output, self._seed(action.microbatch)) for output in run.outputs]
        return self._arrived(action, Kind.RECV_B)

    def _return(self, action: Action, run: Run, grads: Grads) -> None:
        """Keep the gradients of a run's inputs for the stage before; zeros for unused inputs."""
        number, _, microbatch = action
        filled = [torch.zeros_like(i) if grad is None else grad for grad, i in zip(grads, run.inputs, strict=True)]
        if number - 1 in self._position.stages:
            self._cotangents[number - 1, microbatch] = filled
        elif number > 0:
            self._results[number, microbatch] = filled

    def _send_carry(self, action: Action) -> None:
        result, link = self._results.pop((action.stage, action.microbatch)), self._link(action)
        self._sent[action] = send_tree(link, result, self._tag(action), self._gone.get(link.peer, ()))
        self._gone[link.peer] = facts_of(tensors_of(result))

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
        forwarded = action.kind is Kind.RECV_F or (action.stage, action.microbatch) in self._runs
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
            arriving[key] = IncomingTensors(link, facts_of(self._runs[key].outputs), self._tag(action))

    def _arriving(self, receive: Action) -> dict[tuple[int, int], Any]:
        """Where what a receive brings is kept."""
        return self._carries if receive.kind is Kind.RECV_F else self._cotangents

    def _let_go(self, sends: Iterable[Action]) -> None:
        """Free the memory of sent messages; waits for those that have not been received."""
        for action in sends:
            finish(self._sent.pop(action, ()))

    def _link(self, message: Action) -> PeerLink:
        """The link of a message, which its sender and its receiver call the same."""
        forward = message.kind in (Kind.SEND_F, Kind.RECV_F)
        low, high = sorted((message.stage, message.stage + (1 if message.kind in (Kind.SEND_F, Kind.RECV_B) else -1)))
        about = f"activations from stage {low} to {high}" if forward else f"gradients from stage {high} to {low}"
        return self._position.link(peer(self._schedule, message), about)

    def _tag(self, message: Action) -> int:
        return tag(self._schedule, message) * TAGS


def differentiable(tree: Tree) -> list[torch.Tensor]:
    """The tensors of a pytree that require gradients."""
    return [tensor for tensor in tensors_of(tree) if tensor.requires_grad]


def without_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Zeros of a tensor's shape, in the memory of one of them."""
    return tensor.new_zeros(()).expand(tensor.shape)


def fresh_leaf(leaf: Any) -> Any:
    """A leaf of a carry for the next stage on the same rank: the same data, as a leaf of a new graph."""
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf
