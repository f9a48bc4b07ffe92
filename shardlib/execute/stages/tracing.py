"""Tracing a plan without ranks: one micro-batch runs through all stages in turn, on fake tensors, which have no values."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import ref

import torch

from shardlib.common._compat import FakeTensorMode
from shardlib.errors import ShardlibError
from shardlib.execute.batches import split_batch
from shardlib.execute.counting import LiveBytes, Stretch, WorkCount
from shardlib.execute.executor import Executor
from shardlib.execute.gradients import Turn, default_options
from shardlib.execute.handles import Handle
from shardlib.execute.losses import read_loss, require_function, require_no_buffers
from shardlib.execute.phases import Phases, followed
from shardlib.execute.recompute import require_known
from shardlib.execute.refusals import require_open
from shardlib.execute.sequence import require_whole_loss
from shardlib.execute.stages.one import OneStage, StepInputs, keys_of
from shardlib.execute.stages.pipe import require_blocks
from shardlib.execute.stages.runs import EagerRun, fresh_leaf
from shardlib.execute.stages.values import UNKNOWN, Values
from shardlib.execute.stages.walk import Called, SentBytes, Walk, as_another, kinds_of
from shardlib.execute.totals import Weighing
from shardlib.mesh.mesh import Mesh
from shardlib.mesh.transport import EchoGroup
from shardlib.nn.blocks import Sequential
from shardlib.plan.deduplication import TraceCache, deduplicated, seen_in_traces
from shardlib.plan.drops import DropPlan
from shardlib.plan.exchanges import Reductions
from shardlib.plan.plan import Plan
from shardlib.plan.records import Trace
from shardlib.rng import Key
from shardlib.sharded.gradient_offload import FakeGradientOffload
from shardlib.sharded.tree import Sharded
from shardlib.tree import Tree, flatten, tensors_of, tree_map

_log = logging.getLogger("shardlib.plan")
_KEY = Key(0)
_UNEVEN = "if values decide which units a rank uses, all ranks gather the units that any rank uses"


@dataclass(frozen=True)
class Tracing:
    """Traces of one loss function under any plan.

    Attributes:
        batch: one rank's share, on any device.
        buffers: those that the loss takes, or None.
        device: the ranks' device.
        step: the number of the step, for what it leaves out of layers; None for a step that leaves out nothing.
        key: of the step.
    """

    loss_fn: Callable[..., Any]
    batch: Tree
    buffers: Tree
    device: torch.device
    step: int | None = None
    key: Key = _KEY

    def traced(self, plan: Plan) -> Plan:
        """The plan with its traces, from one micro-batch. If tracing fails, a note in the log says so."""
        try:
            walks, spans = self.walks(plan), plan.stages.spans
        except Untraceable as error:
            notes = f"not traced: {error}", _UNEVEN
            return replace(plan, claims=plan.claims and plan.claims.noting(notes))
        return replace(plan, traces=tuple(walk.trace(start) for walk, (start, _) in zip(walks, spans, strict=True)))

    def walks(self, plan: Plan) -> tuple[Walk, ...]:
        """What one micro-batch does in each stage.

        Raises:
            Untraceable: the loss reads values that nobody has, or fails on tensors of the largest sizes that they can have.
        """
        values = Values()
        with self._setting(plan, values) as setting:
            try:
                seen = _walks(setting)
            except UNKNOWN as error:
                raise Untraceable(f"the loss reads values ({error})") from error
            except Exception as error:
                if not values.bounded or isinstance(error, ShardlibError):
                    raise
                why = str(error).partition("\n")[0]
                raise Untraceable(f"sizes depend on values ({', '.join(values.bounded)}): {why}") from error
        return tuple(replace(walk, assumptions=values.assumptions) for walk in seen)

    @contextmanager
    def _setting(self, plan: Plan, values: Values) -> Iterator[_Setting]:
        """What a plan is traced with."""
        needed = "params, batch" if self.buffers is None else "params, buffers, batch"
        require_function(self.loss_fn, "the loss function", needed)
        if self.buffers is None:
            require_no_buffers(self.loss_fn, "give them by buffers=")
        groups = {axis: EchoGroup(size) for axis, size in plan.sizes.items()}
        mesh = Mesh(plan.sizes, 0, groups, self.device, abstract=True)
        fake = FakeTensorMode(allow_non_fake_inputs=True)

        def pretend(leaf: Any, given: bool = False) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            whole_numbers = not (leaf.is_floating_point() or leaf.is_complex())
            if given and whole_numbers and type(leaf) is torch.Tensor and leaf.device == self.device:
                return values.known(leaf)
            if leaf.device == self.device or leaf.layout is not torch.strided:
                return fake.from_tensor(leaf)
            with fake:  # a tensor of another device, or without memory: the trace runs on one device
                return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=self.device)

        batch, buffers = tree_map(partial(pretend, given=True), self.batch), tree_map(pretend, self.buffers)
        # Codecs' kernels do not run on tensors without values, so everything is sent uncompressed.
        plain = replace(plan, reductions=Reductions(second_level=plan.reductions.second_level))
        with fake:
            stored = {
                b.name: torch.empty(b.size(b.param_level), dtype=b.dtype, device=self.device) for b in plan.buckets
            }
            with values:
                yield _Setting(self, plain, mesh, Sharded(plain, mesh, "param", stored), batch, buffers)


@dataclass(frozen=True)
class _Setting:
    """What a plan is traced with: all buckets of all stages, the first rank's batch and buffers, without values."""

    tracing: Tracing
    plan: Plan
    mesh: Mesh
    params: Sharded
    batch: Tree
    buffers: Tree


class Untraceable(Exception):
    """A loss of which no trace can be made; says why."""


def traced_once(tracing: Tracing) -> TraceCache:
    """Traces of plans, each kind once. A function that is a sequence of blocks shows in short forms all that it does: blocks
    that are left out are the same function of parameters that are treated alike, and get a carry of the same form."""
    return TraceCache(tracing.traced, Shortly(tracing), sure=isinstance(tracing.loss_fn, Sequential))


class Shortly:
    """Traces of deep functions from short forms of their plans. A short form serves any number of blocks."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self._walks: list[tuple[Plan, tuple[Walk, ...]]] = []

    def __call__(self, plan: Plan) -> tuple[Trace, ...] | None:
        """The traces of a plan; None where no short form shows them."""
        loss_fn, tracing = self._tracing.loss_fn, self._tracing
        functions = loss_fn.functions if isinstance(loss_fn, Sequential) else None
        if plan.step.has_drops and tracing.step is not None:  # that step leaves out some layers, not others
            return None
        short = deduplicated(plan, functions)
        if short is None:
            return None
        if functions is not None:
            tracing = replace(tracing, loss_fn=Sequential([functions[number] for number in short.kept]))
        walks = self._seen(short.plan, tracing)
        if len(walks) != len(short.stages):
            return None
        for walk, stage in zip(walks, short.stages):
            if walk.blocks != stage.blocks or not all(walk.steady(n, stage.leaving[n]) for n in stage.repeats):
                return None
        return tuple(
            walk.trace(stage.first, stage.repeats, short.represents) for walk, stage in zip(walks, short.stages)
        )

    def _seen(self, plan: Plan, tracing: Tracing) -> tuple[Walk, ...]:
        """What one micro-batch does in each stage; nothing if the function fails."""
        seen = seen_in_traces(plan)
        known = next((walks for other, walks in self._walks if other == seen), None)
        if known is None:
            try:
                known = tracing.walks(plan)
            except Exception as error:  # the function's own: it may need all of its parameters
                _log.debug("no short form: %s", error)
                known = ()
            self._walks.append((seen, known))
        return known


def _walks(setting: _Setting) -> tuple[Walk, ...]:
    """What the first of a rank's micro-batches does in each stage, at a step, or one that leaves out nothing."""
    holding: set[int] = set()
    while True:
        try:
            if setting.plan.stages.axes:
                return _of_stages(setting, holding)
            return (_of_one(setting, bool(holding)),)
        except _Holds as seen:
            holding.add(*seen.args)


class _Holds(Exception):
    """A stage's function, of this number, turns out to hold gathered parameters until backward (`Record.holds`): as all its
    later runs do, it is traced from the beginning."""


def _of_one(setting: _Setting, holds: bool) -> Walk:
    tracing, plan, mesh, buffers = setting.tracing, setting.plan, setting.mesh, setting.buffers
    loss_fn = tracing.loss_fn
    runner = OneStage(loss_fn, plan, mesh, trained=True, with_buffers=buffers is not None)
    runner.executor.record.holds = holds
    phases = _Phases(isinstance(loss_fn, Sequential))
    alone: list[list[Stretch]] = []
    summed: list[list[Stretch]] = []
    landing: FakeGradientOffload  # of the last run
    last = plan.step.microbatches - 1

    def run(*indices: int) -> None:
        """Note what some micro-batches, with the cast batch, do to memory; and what the first of them does alone."""
        nonlocal landing
        landing = FakeGradientOffload(plan, mesh, ())
        live = LiveBytes(lambda: phases.now)
        with live, followed(lambda _: phases):
            microbatches = split_batch(setting.batch, plan, mesh)
            keys = keys_of(plan, mesh, microbatches, tracing.key)
            drops = [plan.step.drops(tracing.step, key) for key in keys]
            call = StepInputs(
                setting.params, microbatches, keys, drops, buffers, 1.0, 1.0, Weighing(plan, mesh, 1, None)
            )
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


def _of_stages(setting: _Setting, holding: set[int]) -> tuple[Walk, ...]:
    tracing, plan, mesh, key = setting.tracing, setting.plan, setting.mesh, setting.tracing.key
    blocks, spans = require_blocks(tracing.loss_fn, plan), plan.stages.spans
    batch, drops = split_batch(setting.batch, plan, mesh)[0], plan.step.drops(tracing.step, key)
    # A step leaves out some layers, not others.
    kinds = kinds_of(plan, blocks) if drops is None else range(len(spans))
    known: list[tuple[Any, _TracedStage]] = []  # of each stage that is traced: its kind, with its carry's form
    stands: list[int] = []  # for each stage the number of the one that is traced for it
    carries: list[Tree] = [None]  # what enters the next stage, which alone holds it then
    for number, (kind, (start, stop)) in enumerate(zip(kinds, spans, strict=True)):
        seen = kind, _form(carries[0])
        stands.append(next((n for n, (other, _) in enumerate(known) if other == seen), len(known)))
        if stands[-1] == len(known):

            def compute(tree: Tree, carry: Any, start: int = start, stop: int = stop) -> Any:
                result = blocks.run(tree, carry, batch, start, stop, key)
                if stop == len(blocks):
                    return read_loss(result, False).total
                require_open(result, "what passes between pipeline stages")
                return result

            known.append((seen, _TracedStage(plan, mesh, number, number in holding)))
            known[-1][1].forward(setting.params, carries, compute, drops)
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


class _TracedStage:
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

    def forward(
        self, params: Sharded, carries: list[Tree], compute: Callable[[Tree, Tree], Tree], drops: DropPlan | None
    ) -> None:
        """Run ``compute(parameters, carry)``. The carry is taken out of its list."""
        carry = carries.pop()
        arrived = [tensor.untyped_storage() for tensor in tensors_of(carry)]
        self._arrived, storages = sum(storage.nbytes() for storage in arrived), [*map(ref, arrived)]
        calls: list[None] = []

        def once(_: Executor, tree: Tree, carry: Tree) -> Tree:
            if calls:
                raise _Holds(self.number)
            calls.append(None)
            return compute(tree, carry)

        self._run = run = EagerRun(self.executor, params, once, self._gradients, Turn(0, last=False), drops, [])
        given = run.enter(carry)
        with self._live, self._work, followed(lambda _: self._phases):
            result = run.open(given)
        del arrived, carry, given
        self.executor.rest()
        stays = sum(storage.nbytes() for each in storages if (storage := each()) is not None)
        self._kept = self._live.now + stays
        self._passed = sum(leaf.nbytes for leaf in tensors_of(result)), sum(leaf.nbytes for leaf in run.outputs)
        self._carry = tree_map(_another, result)

    def handed_on(self) -> Tree:
        """The carry of the next stage."""
        return tree_map(_another, self._carry)

    def backward(self) -> None:
        run, outputs = self._run, self._run.outputs
        seeds = [torch.ones_like(output) for output in outputs]
        with self._live, self._work:
            if self._plan.stages.schedule.splits:
                run.inputs_gradient(seeds)
                self._between = self._live.now if run.halved else 0
                run.weights_gradient()
            else:
                run.backward(seeds)
            self._gradients.land()
        run.close()

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
