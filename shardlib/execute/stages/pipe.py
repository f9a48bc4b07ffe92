"""The runner of a pipeline: a loss made of blocks, cut into stages that run by a schedule."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch

from shardlib.collectives import primitives
from shardlib.errors import BatchError, IllegalComposition, TreeError
from shardlib.execute.batches import own_containers, rows_of
from shardlib.execute.collective_order import Record
from shardlib.execute.executor import Executor
from shardlib.execute.gradients import Gradients, ReductionOptions
from shardlib.execute.losses import Outcome, read_loss, require_gradient
from shardlib.execute.recompute import require_known
from shardlib.execute.refusals import outside, require_open
from shardlib.execute.sequence import require_whole_loss
from shardlib.execute.stages.interpreter import Interpreter, Position
from shardlib.execute.stages.messages import (
    TAGS,
    IncomingTensors,
    IncomingTree,
    SentMessage,
    facts_of,
    finish,
    send_tensors,
    send_tree,
)
from shardlib.execute.stages.one import OneStage, StepInputs, detached
from shardlib.execute.stages.runs import Run, Stage
from shardlib.execute.totals import Sums, Totals
from shardlib.mesh.mesh import Mesh
from shardlib.nn.blocks import Sequential
from shardlib.plan.plan import Plan
from shardlib.rng import Key, seeding_torch
from shardlib.schedules import Action, Kind, acknowledged, lower
from shardlib.sharded.tree import Sharded
from shardlib.tree import Tree, tree_map


def require_blocks(loss_fn: Any, plan: Plan) -> Sequential:
    """Check that a loss function can be cut into the plan's stages, and return it.

    Raises:
        IllegalComposition: a loss function that is not made of blocks.
        TreeError: the numbers of blocks and of parameter trees differ.
    """
    if not isinstance(loss_fn, Sequential):
        name = getattr(loss_fn, "__name__", loss_fn)
        raise IllegalComposition(
            f"pipeline needs blocks, and {name!r} is one function. Use sl.sequential([...]) or sl.from_module(module, "
            "blocks=)"
        )
    trees = plan.shape.treedef.num_children
    if len(loss_fn) != trees:
        raise TreeError(
            f"sequential has {len(loss_fn)} blocks and the parameters are {trees} trees. Give one per block, {{}} for none"
        )
    return loss_fn


class Pipe:
    """Runs a rank's stages of an `sl.sequential`.

    Raises:
        IllegalComposition: a function that is not made of blocks, or one with buffers.
        TreeError: the numbers of blocks and of parameter trees differ.
    """

    def __init__(self, loss_fn: Any, plan: Plan, mesh: Mesh, trained: bool, with_buffers: bool = False) -> None:
        if with_buffers:
            raise IllegalComposition("pipeline does not go together with buffers=. Leave them out, or use accumulate()")
        self._blocks = require_blocks(loss_fn, plan)
        self._plan, self._mesh = plan, mesh
        self._schedule = schedule = plan.stages.schedule
        (self._axis,) = plan.stages.axes
        self._home = plan.stages.home(mesh.coords)
        orders = lower(schedule)
        self._order = orders[self._home]
        own = schedule.stages_of(self._home)
        self._stages = {number: Stage(plan.of_stage(number), mesh, trained, number, self._order) for number in own}
        self._position = Position(self._axis, mesh, schedule, own, acknowledged(schedule, orders, self._home))
        self.records: list[Record] = [record for stage in self._stages.values() for record in stage.records]

    def _computed(self, stage: int, tree: Tree, carry: Any, batch: Tree, key: Key | None) -> Any:
        """What the blocks of a stage return."""
        start, stop = self._plan.stages.spans[stage]
        result = self._blocks.run(tree, carry, own_containers(batch), start, stop, key)
        if not self._position.is_last(stage):
            require_open(result, "what passes between pipeline stages")
        return result

    def train(self, call: StepInputs, totals: Totals, options: ReductionOptions) -> dict[str, torch.Tensor]:
        """As `OneStage.train`."""
        outcomes: dict[int, Outcome] = {}
        gradients = {number: Gradients(stage.plan, self._mesh, options) for number, stage in self._stages.items()}

        def run(stage: int, microbatch: int, executor: Executor, tree: Tree, carry: Any) -> Any:
            key = call.keys[microbatch]
            with seeding_torch(key and key.fold_in(stage), self._mesh.device):
                result = self._computed(stage, tree, carry, call.microbatches[microbatch], key)
            if not self._position.is_last(stage):
                return result
            outcome = read_loss(result, False)
            require_gradient(outcome, call.drops[microbatch], call.named(microbatch, self._mesh))
            outcomes[microbatch] = detached(outcome, executor.in_parameters)
            if len(outcome.means) == 1:
                return outcome.total
            return sum(f * mean.total for f, mean in zip(call.weighing.factors(outcome), outcome.means))

        def begin(stage: int, microbatch: int) -> Run:
            compute = partial(run, stage, microbatch)
            return self._stages[stage].begin(microbatch, call.params, compute, gradients[stage], call.drops[microbatch])

        def settle() -> None:
            for sums in gradients.values():
                sums.land()

        first, sequence = all(record.order is None for record in self.records), self._plan.step.sequence
        Interpreter(self._position, begin, lambda index: call.seed(outcomes[index]), settle).run(self._order)
        grads = self._summed(each.result() for each in gradients.values())
        if sequence and first:  # collective over all stages, so it comes after the schedule
            done = {step for record in self.records for step in record.done}
            loss = outcomes[0].means if outcomes else None
            require_whole_loss(sequence, self._mesh, done, loss, [self._axis])
        if first and self._plan.step.remat and (save := self._plan.step.remat.save):
            names = {name for record in self.records for name in record.names}
            of_ranks = primitives.all_gather_object(self._mesh, [self._axis], names)
            require_known(save, set().union(*of_ranks))
        for index in sorted(outcomes):
            totals.add(outcomes[index])
        return grads

    def shared_aux(self, call: StepInputs, aux: Tree, sums: Sums) -> Tree:
        """As `OneStage.shared_aux`. Refuses a scalar loss of micro-batches of different sizes, whose mean would give them
        equal weights."""
        rows = [rows_of(microbatch) for microbatch in call.microbatches]
        if not sums.weighted and len(set(rows)) > 1:
            raise BatchError(
                f"{sum(rows)} rows make {len(rows)} micro-batches of different sizes. Return sl.Mean(total, weight)"
            )
        return self._broadcast(aux, scalars=True) if sums.with_aux else None

    def _summed(self, of_stages: Iterable[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """The gradients of this rank's buckets, from those of its stages."""
        sums: dict[str, torch.Tensor] = {}
        for gradients in of_stages:
            for name, grad in gradients.items():
                sums[name] = sums[name].add_(grad) if name in sums else grad
        self._sum_over_homes(sums)
        return {bucket.name: sums[bucket.name] for bucket in self._plan.trained}

    def evaluate(self, params: Sharded, batch: Tree, rng: Key | None = None) -> Any:
        """The last stage's result, on every rank, from a forward of the whole batch without gradients."""
        order: list[Action] = []
        for stage in self._stages:
            for kind, other in ((Kind.RECV_F, stage - 1), (Kind.F, None), (Kind.SEND_F, stage + 1)):
                if other is None or (0 <= other < self._schedule.stages and other not in self._stages):
                    order.append(Action(stage, kind, 0))
        result: list[Any] = []

        def run(stage: int, executor: Executor, tree: Tree, carry: Any) -> Any:
            value = self._computed(stage, tree, carry, batch, rng)
            if self._position.is_last(stage):
                result.append(outside(value, "the result", executor.in_parameters))
            return value

        def begin(stage: int, microbatch: int) -> Run:
            return self._stages[stage].begin(microbatch, params, partial(run, stage))

        Interpreter(self._position, begin).run(order)
        return self._broadcast(result[0] if result else None)

    def _broadcast(self, value: Tree, *, scalars: bool = False) -> Tree:
        """The ``value`` of the last stage's rank, on every rank along the axis. ``scalars``: see `Traffic`."""
        ranks, number = self._mesh.shape[self._axis], self._free_number() - 1
        about = "what the last stage returns"
        if self._home != self._plan.stages.last:
            arrived = IncomingTree(self._position.link(self._plan.stages.last, about), number * TAGS).wait()
            return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, arrived)
        sent = [
            message
            for other in range(ranks)
            if other != self._home
            for message in send_tree(self._position.link(other, about), value, number * TAGS, scalars=scalars)
        ]
        finish(sent)
        return value

    def _free_number(self) -> int:
        """The first message number that neither a message of the schedule nor `_broadcast` uses."""
        return 2 * self._schedule.stages * self._schedule.microbatches + 1

    def _sum_over_homes(self, grads: dict[str, torch.Tensor]) -> None:
        """Sum the gradients of buckets that several homes hold (tied leaves). All homes get bitwise equal sums."""
        shared = [
            (number, bucket)
            for number, bucket in enumerate(self._plan.everywhere.trained)
            if bucket.name in grads and len(bucket.homes) > 1
        ]
        sent: list[SentMessage] = []
        coming = {}
        for number, bucket in shared:
            local = grads[bucket.name]
            tag = (self._free_number() + number) * TAGS
            for other in bucket.homes:
                if other != self._home:
                    link = self._position.link(other, f"the gradient of {bucket.label}")
                    sent += send_tensors(link, [local], tag)
                    coming[number, other] = IncomingTensors(link, facts_of([local]), tag)
        for number, bucket in shared:
            local = grads[bucket.name]
            first, *others = (local if home == self._home else coming[number, home].wait()[0] for home in bucket.homes)
            grads[bucket.name] = sum(others, start=first)
        finish(sent)


Runner = OneStage | Pipe  # runs a function on one plan and mesh


def runner_of(fn: Any, plan: Plan, mesh: Mesh, trained: bool, with_buffers: bool = False) -> Runner:
    """The runner of ``fn`` on a plan. Raises what `OneStage` and `Pipe` raise."""
    return (Pipe if plan.stages.axes else OneStage)(fn, plan, mesh, trained, with_buffers)
