"""A few steps of a plan on simulated ranks: what each rank computes, and what it exchanges with the others."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardlib.debug.layout import number
from shardlib.debug.watching import LossWatch, NotedRun, copied, own_copy
from shardlib.errors import BatchError, listing
from shardlib.execute.losses import require_function, require_no_buffers
from shardlib.mesh.launch import simulate
from shardlib.mesh.mesh import Mesh, coordinates
from shardlib.mesh.transport import Group, Work
from shardlib.mesh.transport.activity import here
from shardlib.mesh.transport.base import WrappedGroup
from shardlib.optim.base import GradientTransformation
from shardlib.optim.shards import WHOLE, Shards
from shardlib.plan.plan import Plan
from shardlib.rng import Key
from shardlib.sharded.shard import shard_alike
from shardlib.train import make_train_step
from shardlib.tree import Tree, flatten, tree_map, unflatten

Buffers = dict[str, torch.Tensor]
Tensors = dict[int, torch.Tensor]


@dataclass
class WireExchange:
    """One collective of equal parts, as all ranks of a group make it.

    Attributes:
        about: the unit or leaf that it is for, as the executor names it.
        step: the step that it is part of.
        extra: the source of a broadcast, or the pairs of a permutation.
        members: the world's numbers of the ranks, by their number in the group.
        sent, got: each rank's tensor before and after, by its number in the group.
    """

    op: str
    axis: str
    about: str
    step: int | None
    extra: Any = None
    members: dict[int, int] = field(default_factory=dict)
    sent: Tensors = field(default_factory=dict)
    got: Tensors = field(default_factory=dict)

    def due(self, rank: int) -> torch.Tensor:
        """What a rank of the group is to get of what all sent, flat; in float64 where sums are rounded."""
        size = len(self.sent)
        sent = [self.sent[other].reshape(-1) for other in range(size)]
        if self.op == "all_reduce":
            return torch.stack(sent).sum(0)
        if self.op == "all_gather":
            return torch.cat(sent)
        if self.op == "reduce_scatter":
            return torch.stack(sent).sum(0).view(size, -1)[rank]
        if self.op == "all_to_all":
            return torch.cat([value.view(size, -1)[rank] for value in sent])
        if self.op == "broadcast":
            return sent[self.extra]
        sources = [source for source, target in self.extra if target == rank]
        return sent[sources[0]] if sources else torch.zeros_like(sent[rank])


_NOTED = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "permute")


class _NotedGroup(WrappedGroup):
    """A group whose collectives of equal parts are noted in ``made``, by axis, other coordinates and number."""

    def __init__(self, made: dict[Any, WireExchange], mesh: Mesh, axis: str, group: Group) -> None:
        super().__init__(group)
        self._made, self._axis, self._world = made, axis, mesh.rank
        self._key = axis, tuple(sorted((a, c) for a, c in mesh.coords.items() if a != axis))
        self._count = 0

    def exchange(self, op: str, out: Any, inp: Any, start: Callable[[], Work], about: Any = None) -> Work:
        if op not in _NOTED or (op == "all_to_all" and about is not None):
            return start()
        key, self._count, names = (*self._key, self._count), self._count + 1, here()
        noted = self._made.setdefault(key, WireExchange(op, self._axis, names.path, names.step, about))
        noted.members[self.rank], noted.sent[self.rank] = self._world, copied(inp)
        work = start()

        def finish() -> None:
            work.wait()
            noted.got[self.rank] = copied(out)

        return Work(finish)


@dataclass(frozen=True)
class PlanTrial:
    """What is run under a plan, and on one device.

    Attributes:
        loss_fn: as for `make_train_step`, without buffers.
        params: values of all parameters.
        batch: the global batch of every step, of tensors.
        steps: how many.
        rng: as for `make_train_step`.

    Raises:
        LossError: a loss function that is not callable, or a module.
        TypeError: the loss function takes buffers.
    """

    loss_fn: Callable[..., Any]
    params: Tree
    batch: Tree
    optimizer: GradientTransformation
    steps: int
    rng: Key

    def __post_init__(self) -> None:
        require_function(self.loss_fn, "the loss function", "params, batch")
        require_no_buffers(
            self.loss_fn,
            "sl.debug replays one that closes over constant ones, lambda params, batch: loss_fn(params, buffers, batch)[0]",
        )


@dataclass
class RankStep:
    """One step of one rank.

    Attributes:
        runs: of the loss function.
        grads: bucket name -> gradient, as the optimizer is given it.
        scale: what the optimizer multiplies it by.
        written: bucket name -> the optimizer's copy of the parameters after the update.
        inner: the optimizer's state after it.
        params: bucket name -> stored parameters after the step.
        comm: what compressed exchanges have kept, before and after the step.
        metrics: of the step.
        payload: axis -> payload bytes that the rank has sent.
    """

    runs: list[NotedRun] = field(default_factory=list)
    grads: Buffers = field(default_factory=dict)
    scale: float = 1.0
    written: Buffers = field(default_factory=dict)
    inner: Any = None
    params: Buffers = field(default_factory=dict)
    comm: tuple[Buffers, Buffers] = field(default_factory=lambda: ({}, {}))
    metrics: Mapping[str, Any] = field(default_factory=dict)
    payload: dict[str, int] = field(default_factory=dict)


@dataclass
class Replay:
    """Some steps of a plan.

    Attributes:
        exchanges: of all ranks, in the order in which their first rank made them.
        start: rank -> stored parameters before the first step.
        steps: rank -> its steps; the last one may have ended early.
        error: what ended it.
    """

    plan: Plan
    exchanges: dict[Any, WireExchange] = field(default_factory=dict)
    start: dict[int, Buffers] = field(default_factory=dict)
    steps: dict[int, list[RankStep]] = field(default_factory=dict)
    error: Exception | None = None

    def of_cell(self, step: int, cell: int) -> dict[int, dict[int, NotedRun]]:
        """Rank -> first block -> run, for the ranks that work on a micro-batch; see `cells`."""
        plan, found = self.plan, dict[int, dict[int, NotedRun]]()
        share, index = divmod(cell, plan.step.microbatches)
        for rank, steps in self.steps.items():
            coords = coordinates(plan.sizes, rank)
            if number(plan.batch_axes, plan.sizes, coords) == share and step < len(steps):
                found[rank] = _of_microbatch(plan, coords, steps[step].runs, index)
        return found


def _of_microbatch(plan: Plan, coords: Mapping[str, int], runs: Sequence[NotedRun], index: int) -> dict[int, NotedRun]:
    """First block -> run, of one of a rank's micro-batches. A step that was repeated has the last runs."""
    found = {}
    for stage in plan.stages.local[plan.stages.home(coords)]:
        first = plan.stages.spans[stage][0] if plan.stages.axes else 0
        order = [a.microbatch for a in plan.stages.schedule.orders[plan.stages.home(coords)] if a[:2] == (stage, "F")]
        mine = [run for run in runs if run.stage == first]
        whole = len(mine) // len(order) * len(order)
        mine = mine[max(whole - len(order), 0) :] if whole else mine
        for microbatch, run in zip(order, mine):
            if microbatch == index:
                found[first] = run
    return found


def cells(batch: Tree, plan: Plan) -> list[Tree]:
    """The micro-batches of all ranks, in the order of the global batch.

    Raises:
        BatchError: the rows do not divide, or there are none.
    """
    paths, leaves, treedef = flatten(batch)
    count = plan.batch_ranks * plan.step.microbatches
    unfit = [
        f"{path or 'batch'}: {leaf.shape[0]} rows"
        for path, leaf in zip(paths, leaves, strict=True)
        if isinstance(leaf, torch.Tensor) and leaf.dim() and (leaf.shape[0] % count or not len(leaf))
    ]
    if unfit:
        raise BatchError(
            f"the global batch does not divide into the {count} micro-batches of {plan.batch_ranks} ranks × "
            f"{plan.step.microbatches}:\n{listing(unfit)}\nGive a multiple of {count} rows"
        )
    columns = [_chunks(leaf, count) for leaf in leaves]
    return [unflatten(treedef, [column[index] for column in columns]) for index in range(count)]


def _chunks(leaf: Any, count: int) -> Sequence[Any]:
    return leaf.chunk(count) if isinstance(leaf, torch.Tensor) and leaf.dim() else [leaf] * count


def share_of(batch: Tree, plan: Plan, coords: Mapping[str, int]) -> Tree:
    """A rank's rows of the global batch."""
    index = number(plan.batch_axes, plan.sizes, coords)
    return own_copy(tree_map(lambda leaf: _chunks(leaf, plan.batch_ranks)[index], batch))


def replay(plan: Plan, trial: PlanTrial) -> Replay:
    """Run a trial's steps under a plan. An error that ends them is kept, with what was noted before."""
    made = Replay(plan)

    def of_rank(mesh: Mesh) -> None:
        mesh = mesh.with_transport(functools.partial(_NotedGroup, made.exchanges, mesh))
        rank, watch = mesh.rank, LossWatch()
        mine = made.steps[rank] = []
        placed = shard_alike(trial.params, plan.at(mesh.coords), mesh)
        made.start[rank] = _copies(placed.buffers)
        watched, loss_fn = _Watched(trial.optimizer), watch.watched(trial.loss_fn)
        state, train_step = make_train_step(loss_fn, placed, watched, rng=trial.rng, nonfinite="skip")
        for _ in range(trial.steps):
            noted = watched.step = RankStep(watch.runs)
            mine.append(noted)
            before = _copies(state.comm)
            mesh.traffic.reset()
            state, noted.metrics = train_step(state, share_of(trial.batch, plan, mesh.coords))
            noted.params, noted.comm = _copies(state.params.buffers), (before, _copies(state.comm))
            noted.inner = tree_map(lambda x: copied(x) if isinstance(x, torch.Tensor) else x, state.opt.inner)
            noted.payload = dict(mesh.traffic.payload)
            watch.runs = []

    try:
        simulate(of_rank, mesh=plan.sizes)
    except Exception as error:
        made.error = error
    return made


def _copies(buffers: Mapping[str, torch.Tensor]) -> Buffers:
    return {name: copied(buffer) for name, buffer in buffers.items()}


class _Watched(GradientTransformation):
    """A gradient transformation whose gradients and new parameters are noted."""

    step: RankStep

    def __init__(self, inner: GradientTransformation) -> None:
        self.__dict__.update(inner.__dict__)

    def lead(self, updates: Tree, scale: torch.Tensor | None, shards: Shards) -> torch.Tensor | None:
        self.step.grads.update(_copies(updates))
        self.step.scale = 1.0 if scale is None else float(scale)
        return super().lead(updates, scale, shards)

    def body(
        self,
        params: Tree,
        updates: Tree,
        state: Tree,
        *,
        scale: torch.Tensor | None,
        shards: Shards = WHOLE,
        copies: Tree,
        old: tuple[Tree, Tree] | None = None,
    ) -> Tree:
        new = {name: grad for name, grad in updates.items() if name not in self.step.grads}
        if new:  # of an update without `lead`
            self.step.grads.update(_copies(new))
            self.step.scale = 1.0 if scale is None else float(scale)
        after = super().body(params, updates, state, scale=scale, shards=shards, copies=copies, old=old)
        self.step.written.update(_copies(params))
        return after
