"""The runner of a pipeline: a loss made of blocks, cut into stages that run by a schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from shardlib.collectives import primitives
from shardlib.errors import BatchError, IllegalComposition, TreeError
from shardlib.execute.batches import rows_of
from shardlib.execute.executor import Executor
from shardlib.execute.gradients import Gradients, ReductionOptions
from shardlib.execute.losses import Outcome, read_loss, require_gradient
from shardlib.execute.recompute import require_known
from shardlib.execute.refusals import outside, require_open
from shardlib.execute.sequence import require_whole_loss
from shardlib.execute.stages.base import StepInputs, detached
from shardlib.execute.stages.interpreter import Compute, Interpreter, Position, Stage
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
        raise IllegalComposition(
            f"pipeline needs a loss made of blocks, and {getattr(loss_fn, '__name__', loss_fn)!r} is one function; make it "
            "sl.sequential([...]): gpt.make_sequential(config) does it for the library's GPT, sl.from_module(module, "
            "blocks=...) for modules, transformers' decoders included"
        )
    trees = plan.shape.treedef.num_children
    if len(loss_fn) != trees:
        raise TreeError(
            f"sequential has {len(loss_fn)} blocks and the parameters are {trees} trees; give one tree "
            "per block, an empty one where a block has no parameters"
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
            raise IllegalComposition(
                "pipeline does not bring buffers= from stage to stage; leave them out, or use accumulate() instead"
            )
        self._blocks = require_blocks(loss_fn, plan)
        self._plan, self._mesh = plan, mesh
        self._schedule = schedule = plan.stages.schedule
        (self._axis,) = plan.stages.axes
        self._home = plan.stages.home(mesh.coords)
        orders = lower(schedule)
        self._order = orders[self._home]
        halved = {(action.stage, action.microbatch) for action in self._order if action.kind is Kind.I}
        stages = {
            number: Stage(plan.of_stage(number), mesh, trained, [i for stage, i in halved if stage == number])
            for number in schedule.stages_of(self._home)
        }
        self._position = Position(self._axis, mesh, schedule, stages, acknowledged(schedule, orders, self._home))
        self.records = [record for stage in stages.values() for record in stage.records]

    def _computing(self, microbatches: Sequence[Tree], keys: Sequence[Key | None]) -> Compute:
        """A function that runs the blocks of a stage on one of these micro-batches."""

        def compute(stage: int, microbatch: int, tree: Tree, carry: Any) -> Any:
            start, stop = self._plan.stages.spans[stage]
            result = self._blocks.run(tree, carry, microbatches[microbatch], start, stop, keys[microbatch])
            if not self._position.is_last(stage):
                require_open(result, "what passes between pipeline stages")
            return result

        return compute

    def train(self, call: StepInputs, totals: Totals, options: ReductionOptions) -> dict[str, torch.Tensor]:
        compute = self._computing(call.microbatches, call.keys)
        outcomes: dict[int, Outcome] = {}

        def run(stage: int, microbatch: int, tree: Tree, carry: Any) -> Any:
            key = call.keys[microbatch]
            with seeding_torch(key and key.fold_in(stage), self._mesh.device):
                result = compute(stage, microbatch, tree, carry)
            if not self._position.is_last(stage):
                return result
            outcome = read_loss(result, False)
            require_gradient(outcome, call.thinned[microbatch], call.named(microbatch, self._mesh))
            outcomes[microbatch] = detached(outcome, self._executor(stage, microbatch).in_parameters)
            if len(outcome.means) == 1:
                return outcome.total
            return sum(f * mean.total for f, mean in zip(call.weighing.factors(outcome), outcome.means))

        first, sequence = all(record.order is None for record in self.records), self._plan.step.sequence
        grads = self._gradients(call, run, lambda microbatch: call.seed(outcomes[microbatch]), options)
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
        if not sums.weighted:
            _require_even(call.microbatches)
        return self._broadcast(aux, scalars=True) if sums.with_aux else None

    def _gradients(
        self, call: StepInputs, compute: Compute, seed: Callable[[int], float], options: ReductionOptions
    ) -> dict[str, torch.Tensor]:
        """The gradients of this rank's buckets, in the optimizer's layout, summed over micro-batches.

        The last stage's result is differentiated, with ``seed(microbatch)`` as its gradient.
        """
        gradients = {
            number: Gradients(stage.plan, self._mesh, options) for number, stage in self._position.stages.items()
        }
        Interpreter(self._position, call.params, compute, gradients, seed, call.thinned).run(self._order)
        return self._summed(each.result() for each in gradients.values())

    def _summed(self, of_stages: Iterable[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """The gradients of this rank's buckets, from those of its stages."""
        sums: dict[str, torch.Tensor] = {}
        for gradients in of_stages:
            for name, grad in gradients.items():
                sums[name] = sums[name].add_(grad) if name in sums else grad
        self._sum_over_homes(sums)
        return {bucket.name: sums[bucket.name] for bucket in self._plan.trained}

    def _executor(self, stage: int, microbatch: int) -> Executor:
        """The executor of a micro-batch in flight in a stage of this rank."""
        return self._position.stages[stage].runs[microbatch].executor

    def evaluate(self, params: Sharded, *args: Any) -> Any:
        """The last stage's result, on every rank, from a forward of the whole batch without gradients."""
        batch, rng = _batch(*args)
        compute = self._computing([batch], [rng])
        order: list[Action] = []
        for stage in self._position.stages:
            for kind, other in ((Kind.RECV_F, stage - 1), (Kind.F, None), (Kind.SEND_F, stage + 1)):
                if other is None or (0 <= other < self._schedule.stages and other not in self._position.stages):
                    order.append(Action(stage, kind, 0))
        result: list[Any] = []

        def noted(stage: int, microbatch: int, tree: Tree, carry: Any) -> Any:
            value = compute(stage, microbatch, tree, carry)
            if self._position.is_last(stage):
                result.append(outside(value, "the result", self._executor(stage, microbatch).in_parameters))
            return value

        Interpreter(self._position, params, noted, None, None).run(order)
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


def _require_even(microbatches: Sequence[Tree]) -> None:
    """Refuse micro-batches of different sizes, for a scalar loss, whose mean would give them equal weights."""
    rows = [rows_of(microbatch) for microbatch in microbatches]
    if len(set(rows)) > 1:
        raise BatchError(
            f"the batch's {sum(rows)} rows make {len(rows)} micro-batches of different sizes, and the loss is a mean over "
            "each; return sl.Mean(total, weight), or use a batch that divides"
        )


def _batch(batch: Tree, rng: Key | None = None) -> tuple[Tree, Key | None]:
    """The arguments with which blocks are evaluated."""
    return batch, rng
