"""A micro-batch's way through one stage: its forward, and its backward, whole or in two halves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from shardlib.execute.activation_stores import HostBuffers, host_memory
from shardlib.execute.collective_order import Record
from shardlib.execute.executor import Executor
from shardlib.execute.gradients import Gradients, Turn
from shardlib.execute.handles import materialise
from shardlib.execute.losses import refuse_reentrant_checkpoints
from shardlib.mesh.mesh import Mesh
from shardlib.plan.drops import DropPlan
from shardlib.plan.plan import Plan
from shardlib.schedules import Action, Kind
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

    halved: bool

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
        drops: what the micro-batch leaves out.
        idle: where the executor goes in the end.
    """

    executor: Executor

    def __init__(
        self,
        executor: Executor,
        params: Sharded,
        compute: Callable[[Executor, Tree, Tree], Tree],
        gradients: Gradients | None,
        turn: Turn,
        drops: DropPlan | None,
        idle: list[Executor],
    ) -> None:
        super().__init__()
        self.executor, self._params, self._compute, self._drops = executor, params, compute, drops
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
            self._params, self._gradients, lambda tree: self._computed(tree, carry), self._drops
        )
        self.outputs: list[Any] = differentiable(result)
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

    plan: Plan

    def __init__(self, plan: Plan, mesh: Mesh, trained: bool, number: int, order: Iterable[Action]) -> None:
        self.plan, self._mesh, self._trained = plan, mesh, trained
        own = [action for action in order if action.stage == number]
        self._halved = {action.microbatch for action in own if action.kind is Kind.I}
        self._last = [action.microbatch for action in own if action.kind in (Kind.B, Kind.W)][-1]
        self.records: tuple[Record, Record] = (
            Record(plan, mesh),
            Record(plan, mesh),
        )  # of whole backwards, and of split ones
        self.host: HostBuffers | None = host_memory(plan.step.remat, mesh) if trained else None
        self._idle: tuple[list[Executor], list[Executor]] = [], []

    def begin(
        self,
        microbatch: int,
        params: Sharded,
        compute: Callable[[Executor, Tree, Tree], Tree],
        gradients: Gradients | None = None,
        drops: DropPlan | None = None,
    ) -> EagerRun:
        """The run of a micro-batch; arguments as of `EagerRun`."""
        kind = microbatch in self._halved
        idle, record = self._idle[kind], self.records[kind]
        executor = idle.pop() if idle else Executor(self.plan, self._mesh, self._trained, record, self.host)
        turn = Turn(microbatch, microbatch == self._last)
        return EagerRun(executor, params, compute, gradients, turn, drops, idle)


def differentiable(tree: Tree) -> list[torch.Tensor]:
    """The tensors of a pytree that require gradients."""
    return [tensor for tensor in tensors_of(tree) if tensor.requires_grad]


def without_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Zeros of a tensor's shape, in the memory of one of them."""
    return tensor.new_zeros(()).expand(tensor.shape)


def fresh_leaf(leaf: Any) -> Any:
    """A leaf of a carry for the next stage on the same rank: the same data, as a leaf of a new graph."""
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf
