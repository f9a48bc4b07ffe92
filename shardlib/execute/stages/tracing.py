"""Tracing a plan without ranks: one micro-batch runs through all stages in turn, on fake tensors."""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch

from shardlib.execute.batches import split_batch
from shardlib.execute.counting import LiveBytes, Stretch, WorkCount
from shardlib.execute.executor import Executor
from shardlib.execute.gradients import Turn, default_options
from shardlib.execute.handles import Handle, materialise
from shardlib.execute.losses import read_loss
from shardlib.execute.phases import Phases, followed
from shardlib.execute.recompute import require_known
from shardlib.execute.refusals import require_open
from shardlib.execute.sequence import require_whole_loss
from shardlib.execute.stages.base import StepInputs, keys_of
from shardlib.execute.stages.entry import entered
from shardlib.execute.stages.interpreter import Run, differentiable, fresh_leaf
from shardlib.execute.stages.one import OneStage
from shardlib.execute.stages.pipe import require_blocks
from shardlib.execute.stages.walk import Called, SentBytes, Walk, as_another, kinds_of
from shardlib.execute.totals import Weighing
from shardlib.mesh.mesh import Mesh
from shardlib.nn.blocks import Sequential
from shardlib.plan.plan import Plan
from shardlib.plan.thinning import Thinned
from shardlib.rng import Key
from shardlib.sharded.landing import FakeLanding
from shardlib.sharded.tree import Sharded
from shardlib.tree import Tree, flatten, leaves_of, tree_map


def walks(
    loss_fn: Any, plan: Plan, mesh: Mesh, params: Sharded, batch: Tree, buffers: Tree, rng: Key, step: int | None
) -> tuple[Walk, ...]:
    """What the first of a rank's micro-batches does in each stage, at a step with its key, or one that leaves out nothing.
    ``params`` holds the buckets of all stages."""
    holding: set[int] = set()
    while True:
        try:
            if not plan.stages.axes:
                return (_of_one(loss_fn, plan, mesh, params, batch, buffers, rng, step, bool(holding)),)
            return _of_stages(loss_fn, plan, mesh, params, split_batch(batch, plan, mesh)[0], rng, step, holding)
        except _Holds as seen:
            holding.add(seen.stage)


class _Holds(Exception):
    """A stage's function turns out to hold gathered parameters until backward (`Record.holds`): as all its later runs do, it
    is traced from the beginning."""

    def __init__(self, stage: int) -> None:
        super().__init__(stage)
        self.stage = stage


def _of_one(
    loss_fn: Any,
    plan: Plan,
    mesh: Mesh,
    params: Sharded,
    batch: Tree,
    buffers: Tree,
    rng: Key,
    step: int | None,
    holds: bool,
) -> Walk:
    runner = OneStage(loss_fn, plan, mesh, trained=True, with_buffers=buffers is not None)
    runner.executor.record.holds = holds
    phases = _Phases(isinstance(loss_fn, Sequential))
    alone: list[list[Stretch]] = []
    summed: list[list[Stretch]] = []
    landing: FakeLanding  # of the last run
    last = plan.step.microbatches - 1

    def run(*indices: int) -> None:
        """Note what some micro-batches, with the cast batch, do to memory; and what the first of them does alone."""
        nonlocal landing
        landing = FakeLanding(plan, mesh, ())
        live = LiveBytes(lambda: phases.now)
        with live, followed(lambda _: phases):
            microbatches = split_batch(batch, plan, mesh)
            keys = keys_of(plan, mesh, microbatches, rng)
            thinned = [plan.step.thinned(step, key) for key in keys]
            call = StepInputs(params, microbatches, keys, thinned, buffers, 1.0, 1.0, Weighing(plan, mesh, 1, None))
            gradients = runner.executor.gradients(default_options(mesh, landing))
            for number, index in enumerate(indices):
                runner.microbatch(call, index, buffers, gradients)
                if not number:
                    alone.append(live.stretches(without=gradients.held))
        summed.append(live.stretches())

    with WorkCount(lambda: phases.now, lambda: _moved(runner.executor, mesh)) as work:
        run(0)
    if runner.executor.record.holds and not holds:
        raise _Holds(0)
    # The second run follows the first one's trace, and gathers the next unit ahead. Its later micro-batches find sums of
    # earlier ones, and the last one ends with the step's exchanges.
    if runner.executor.gathers or last:
        run(*sorted({0, min(1, last), last}))
    executor = runner.executor
    seen = executor.touches, executor.reduced, phases.carries, phases.blocks, landing.spare
    return Walk(alone, summed, work.done, *seen, again=executor.record.late)


def _of_stages(
    loss_fn: Any, plan: Plan, mesh: Mesh, params: Sharded, batch: Tree, rng: Key, step: int | None, holding: set[int]
) -> tuple[Walk, ...]:
    blocks, spans = require_blocks(loss_fn, plan), plan.stages.spans
    thinned = plan.step.thinned(step, rng)
    # A step leaves out some layers, not others.
    kinds = kinds_of(plan, blocks) if thinned is None else range(len(spans))
    known: list[tuple[Any, _Stage]] = []  # of each stage that is traced: its kind, with its carry's form
    stands: list[int] = []  # for each stage the number of the one that is traced for it
    carries: list[Any] = [None]  # what enters the next stage, whose function takes it out
    for number, (kind, (start, stop)) in enumerate(zip(kinds, spans, strict=True)):
        seen = kind, _form(carries[0])
        stands.append(next((n for n, (other, _) in enumerate(known) if other == seen), len(known)))
        if stands[-1] == len(known):

            def compute(tree: Tree, carry: Any, start: int = start, stop: int = stop) -> Any:
                result = materialise(blocks.run(tree, carry, batch, start, stop, rng))
                if stop == len(blocks):
                    return read_loss(result, False).total
                require_open(result, "what passes between pipeline stages")
                return result

            known.append((seen, _Stage(plan, mesh, number, number in holding)))
            known[-1][1].forward(params, carries, compute, thinned)
        carries = [known[stands[-1]][1].handed_on()]
    stages = [stage for _, stage in known]
    records = [stage.executor.record for stage in stages]
    if plan.step.sequence:
        require_whole_loss(plan.step.sequence, mesh, {step for record in records for step in record.done}, None)
    if plan.step.remat:
        require_known(plan.step.remat.save, {name for record in records for name in record.names})
    for stage in reversed(stages):
        stage.backward()
    done = [stage.walk() for stage in stages]
    return tuple(as_another(done[n], plan, stages[n].number, number) for number, n in enumerate(stands))


class _Stage:
    """One stage of a pipeline, while a micro-batch goes through it."""

    def __init__(self, plan: Plan, mesh: Mesh, number: int, holds: bool) -> None:
        self.number, self._plan, self._mesh = number, plan, mesh
        self.executor = Executor(plan.of_stage(number), mesh, trained=True)
        self.executor.record.holds = holds
        self._gradients = self.executor.gradients(default_options(mesh))
        self._between = 0
        self._phases = phases = _Phases(True)
        self._live = LiveBytes(lambda: phases.now)
        self._work = WorkCount(lambda: phases.now, lambda: _moved(self.executor, mesh))

    def forward(self, params: Sharded, carries: list[Any], compute: Any, thinned: Thinned | None) -> None:
        """Run ``compute(tree, carry)``.

        Args:
            carries: the carry alone, which is taken out of the list: from there on it is the function's alone.
        """
        given, inputs = entered(carries.pop())
        arrived = [leaf.untyped_storage() for leaf in leaves_of(given) if isinstance(leaf, torch.Tensor)]
        self._arrived, storages = sum(storage.nbytes() for storage in arrived), [*map(ref, arrived)]
        carries.append(given)
        del given, arrived

        def run(tree: Tree) -> Any:
            if not carries:
                raise _Holds(self.number)
            return compute(tree, carries.pop())

        with self._live, self._work, followed(lambda _: self._phases):
            result = self.executor.open(params, self._gradients, run, thinned)
        self.executor.rest()
        stays = sum(storage.nbytes() for each in storages if (storage := each()) is not None)
        self._kept = self._live.now + stays
        self._run = Run(self.executor, inputs, differentiable(result))
        tensors = [leaf for leaf in leaves_of(result) if isinstance(leaf, torch.Tensor)]
        self._passed = sum(leaf.nbytes for leaf in tensors), sum(leaf.nbytes for leaf in self._run.outputs)
        self._carry = tree_map(_another, result)

    def handed_on(self) -> Any:
        """The carry of the next stage."""
        return tree_map(_another, self._carry)

    def backward(self) -> None:
        run, seeds, turn = self._run, [torch.ones_like(output) for output in self._run.outputs], Turn(0, last=False)
        with self._live, self._work:
            if self._plan.stages.schedule.splits and run.inputs and run.outputs:
                self.executor.inputs_gradient(run.outputs, seeds, run.inputs)
                self._between = self._live.now
                self.executor.weights_gradient(self._gradients, turn)
            else:
                self.executor.differentiate(run.outputs, seeds, run.inputs, self._gradients, turn)
            self._gradients.land()
        self.executor.close()

    def walk(self) -> Walk:
        """What was seen."""
        forward, backward = self._passed
        return Walk(
            [self._live.stretches(without=self._gradients.held)],
            [self._live.stretches()],
            self._work.done,
            self.executor.touches,
            self.executor.reduced,
            self._phases.carries,
            self._phases.blocks,
            arrived=self._arrived,
            kept=self._kept,
            between=self._between,
            forward=forward,
            backward=backward,
        )


class _Phases(Phases):
    """Phases that note, where the function is a sequence of blocks, what the carry of each block is like."""

    def __init__(self, sequential: bool) -> None:
        super().__init__()
        self._sequential = sequential

    def begin(self) -> None:
        super().begin()
        self.carries: list[Any] = []

    def meets(self, number: int, args: tuple[Any, ...]) -> None:
        if self._sequential:
            _, carry, *_ = args
            self.carries.append(_form(carry))


def _moved(executor: Executor, mesh: Mesh) -> dict[Any, int]:
    """Bytes that the loss has sent, and those of blocks' inputs moved to host memory and back, and held there."""
    host = executor.host
    sent = {SentBytes(axis): count for axis, count in mesh.traffic.activations.items()}
    called = {Called(axis): count for axis, count in mesh.traffic.activation_calls.items()}
    done: dict[Any, int] = {**sent, **called}
    return done if host is None else {**done, "down": host.down, "up": host.up, "host": host.held}


def _form(carry: Any) -> Any:
    """What a carry is to the block, or the stage, that it enters."""
    _, leaves, treedef = flatten(carry)

    def form(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or isinstance(leaf, Handle) or leaf.layout is not torch.strided:
            return leaf
        return leaf.shape, leaf.dtype, leaf.stride(), leaf.requires_grad

    return treedef, [form(leaf) for leaf in leaves]


def _another(leaf: Any) -> Any:
    """A leaf of a carry as from another rank: in memory of its own."""
    return fresh_leaf(leaf.clone()) if isinstance(leaf, torch.Tensor) else leaf
