"""The interpreter of a pipeline schedule: runs one rank's list of actions, one after the other.

Sends never wait, and of each rank that sends to this one the next receive is posted as soon as the one before is taken, so
that messages overlap with computation. Stages on one rank pass results on without a message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

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
from shardlib.execute.stages.runs import Grads, Run, fresh_leaf
from shardlib.mesh.mesh import Mesh
from shardlib.schedules import Action, Kind, Schedule, peer, tag
from shardlib.schedules.events import COMPUTE
from shardlib.tree import tensors_of, tree_map


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
