"""One step of a plan beside the same step on one device: what the parts of a step are compared by."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from functools import cached_property
from typing import Any

import torch

from shardlib.debug.finding import Difference, Finding, difference, worst
from shardlib.debug.layout import best_part, inner_axes, number, segments, shards
from shardlib.debug.one_device import Evaluated, Leaves, OneDevice, is_weighted, mean_gradient
from shardlib.debug.replay import Buffers, PlanTrial, RankStep, Replay, cells, replay
from shardlib.debug.watching import NotedCall, NotedRun
from shardlib.errors import IllegalComposition, NonFiniteError, ShardlibError
from shardlib.execute.batches import cast
from shardlib.mesh.mesh import coordinates
from shardlib.plan.buckets import Bucket
from shardlib.plan.build import with_owner
from shardlib.plan.plan import Plan
from shardlib.tree import Tree, tree_map

Bad = tuple[tuple[int, ...], Difference]  # the ranks on which a value differs, and by how much at most


@dataclass
class StepView:
    """One step.

    Attributes:
        number: of the step, from 0.
        microbatches: of all ranks, in the order of the global batch.
        evaluated: what one device gives for each of them, before the update.
    """

    number: int
    replay: Replay
    device: OneDevice
    microbatches: list[Tree]
    evaluated: list[Evaluated]

    @property
    def plan(self) -> Plan:
        return self.replay.plan

    @cached_property
    def ranks(self) -> dict[int, RankStep]:
        """Rank -> its notes of the step, for ranks that began it."""
        return {rank: steps[self.number] for rank, steps in self.replay.steps.items() if self.number < len(steps)}

    @property
    def ended(self) -> bool:
        """Whether every rank has made the whole step."""
        return bool(self.ranks) and all(step.params for step in self.ranks.values())

    @cached_property
    def grads(self) -> dict[int, Buffers]:
        """Rank -> bucket name -> its gradient of the mean loss in float64, for ranks that have come to the optimizer."""
        return {
            rank: {name: grad.double() * step.scale for name, grad in step.grads.items()}
            for rank, step in self.ranks.items()
            if step.grads
        }

    def coords(self, rank: int) -> dict[str, int]:
        return coordinates(self.plan.sizes, rank)

    def cells_of(self, rank: int) -> list[int]:
        """The numbers of a rank's micro-batches."""
        first = number(self.plan.batch_axes, self.plan.sizes, self.coords(rank)) * self.plan.step.microbatches
        return list(range(first, first + self.plan.step.microbatches))

    @cached_property
    def mean(self) -> tuple[float, Leaves]:
        """Loss and gradient on one device: see `mean_gradient`."""
        return mean_gradient(self.evaluated, is_weighted(self.evaluated))

    def require_finite(self) -> None:
        """Refuse a step from which one device makes no update, as nothing would be compared.

        Raises:
            NonFiniteError: its loss or gradient is not finite; names the step and the first leaf.
        """
        loss, grads = self.mean
        what = next((f"the gradient of {path}" for path, grad in grads.items() if not grad.isfinite().all()), "")
        if what or not math.isfinite(loss):
            raise NonFiniteError(
                f"step {self.number}: {what or 'the loss'} is not finite on one device (loss {loss:g}). Give finite "
                "parameters and a finite batch, or fewer steps"
            )

    def runs(self, cell: int) -> dict[int, list[NotedRun]]:
        """Rank -> its runs of a micro-batch, in the order of the stages."""
        return {
            rank: [runs[first] for first in sorted(runs)]
            for rank, runs in self.replay.of_cell(self.number, cell).items()
        }

    def each_run(self, cell: int) -> Iterator[tuple[int, NotedRun]]:
        """Each rank with each of its runs of a micro-batch."""
        return ((rank, run) for rank, runs in self.runs(cell).items() for run in runs)

    def seed(self, cell: int) -> float | None:
        """The gradient from which a micro-batch's backward began."""
        return next((run.seed for _, run in self.each_run(cell) if run.seed is not None), None)

    def in_parts(self, bucket: Bucket) -> bool:
        """Whether ranks that work on one micro-batch have parts of a bucket's gradient, which one device does not show."""
        sequence, placed = self.plan.step.sequence, [self.plan.placement_of[path] for path in bucket.paths]
        summed = {each.style.axis for each in placed if each.style and each.style.sums}
        summed |= {*bucket.axes, *bucket.replicas, *([sequence.axis] if sequence else [])}
        return bool(summed & {*inner_axes(self.plan)})

    def finding(self, phase: str, operation: str, bad: Bad, **more: Any) -> Finding:
        return Finding(phase, operation, self.number, bad[1], bad[0], **more)

    def call_finding(
        self, phase: str, operation: str, bad: Bad, cell: int, call: NotedCall, note: str = "", leaf: str = ""
    ) -> Finding:
        """A finding in a call of the loss function on one device, for a micro-batch."""
        block = "" if call.block is None else self.evaluated[cell].run.blocks[call.block].name
        return self.finding(phase, operation, bad, microbatch=cell, leaf=leaf, block=block, where=call.where, note=note)

    def of_buckets(
        self, wholes: Mapping[str, torch.Tensor], found: Mapping[int, Mapping[str, torch.Tensor]], level: str
    ) -> Iterator[tuple[Bucket, str, int, Difference, torch.Tensor, torch.Tensor]]:
        """Bucket, leaf, rank, difference, what the rank has and what it should have: of every rank's share of every leaf.

        Args:
            found: rank -> bucket name -> buffer.
            level: "param" or "optimizer": the layout of the buffers.
        """
        for rank, buffers in found.items():
            coords = self.coords(rank)
            for bucket in self.plan.at(coords).buckets:
                if bucket.name not in buffers:
                    continue
                at = bucket.param_level if level == "param" else bucket.levels
                mine = segments(bucket, buffers[bucket.name], at)
                for (path, due), got in zip(shards(self.plan, bucket, wholes, coords, at), mine, strict=True):
                    yield bucket, path, rank, difference(got, due.to(got.dtype)), got, due

    def first_leaf(
        self, wholes: Mapping[str, torch.Tensor], found: Mapping[int, Mapping[str, torch.Tensor]], level: str
    ) -> tuple[Bucket, str, Bad] | None:
        """The first leaf whose shares differ, in the plan's order, and how; None if none does."""
        of_leaf: dict[str, tuple[Bucket, list[tuple[int, Difference]]]] = {}
        for bucket, path, rank, apart, _, _ in self.of_buckets(wholes, found, level):
            of_leaf.setdefault(path, (bucket, []))[1].append((rank, apart))
        for placement in self.plan.placements:
            if placement.path in of_leaf and (bad := worst(of_leaf[placement.path][1])):
                return of_leaf[placement.path][0], placement.path, bad
        return None

    def assembled(self, found: Mapping[int, Mapping[str, torch.Tensor]]) -> Leaves:
        """Path -> whole leaf, from the ranks' shares as the optimizer has them."""
        shapes = {p.path: p.compute.shape for p in self.plan.placements}
        indices = {path: torch.arange(1, math.prod(shape) + 1).view(shape) for path, shape in shapes.items()}
        wholes: Leaves = {}
        for _, path, _, _, got, index in self.of_buckets(indices, found, "optimizer"):
            whole = wholes.setdefault(path, got.new_zeros(math.prod(shapes[path])))
            whole[index[index > 0] - 1] = got[index > 0]
        return {path: whole.view(shapes[path]) for path, whole in wholes.items()}

    def aligned(self, cell: int) -> dict[int, dict[int, NotedCall]]:
        """Rank -> number of a call on one device -> the same call on the rank."""
        wanted = self.evaluated[cell].run.calls
        found = {}
        for rank, runs in self.runs(cell).items():
            blocks = {number for run in runs for number in run.blocks}
            numbers = [n for n, call in enumerate(wanted) if not self.plan.stages.axes or call.block in blocks]
            calls = [call for run in runs for call in run.calls]
            names = [(wanted[n].block, wanted[n].name) for n in numbers], [(call.block, call.name) for call in calls]
            match = SequenceMatcher(None, *names, autojunk=False)
            found[rank] = {
                numbers[same.a + step]: calls[same.b + step]
                for same in match.get_matching_blocks()
                for step in range(same.size)
            }
        return found

    def apart(self, rank: int, found: list[Any], wanted: list[Any], factor: float = 1.0) -> Difference | None:
        """The largest difference of a rank's tensors from their parts of the whole ones; None if they are not alike."""
        if len(found) != len(wanted):
            return None
        coords, pairs = self.coords(rank), zip(found, wanted)
        parts = (
            best_part(self.plan, mine, whole if factor == 1 else whole * factor, coords)
            for mine, whole in pairs
            if mine is not None and whole is not None
        )
        return max((each for each in parts if each is not None), default=None)

    def worst_call(
        self, calls: Mapping[int, NotedCall], wanted: NotedCall, grads: bool = False, seed: float = 1.0
    ) -> Bad | None:
        """How a call's values, or their gradients, differ on the ranks that make it; None if they do not."""
        kind = "grads" if grads else "values"
        found = ((r, self.apart(r, getattr(mine, kind), getattr(wanted, kind), seed)) for r, mine in calls.items())
        return worst(known(found))


def known(differences: Iterable[tuple[int, Difference | None]]) -> Iterator[tuple[int, Difference]]:
    """Rank and difference, of ranks that differ."""
    return ((rank, each) for rank, each in differences if each is not None)


def side_by_side(plan: Plan, trial: PlanTrial) -> tuple[Replay, Iterator[StepView]]:
    """A replay of a trial under a plan, and its steps beside one device, which takes each step in `update`.

    Raises:
        IllegalComposition: a plan that is not to train like one device.
        BatchError: a batch that does not divide.
        NonFiniteError: the loss or its gradient is not finite on one device.
        ShardlibError: what the library refuses on one device too.
    """
    if plan.step.update == "delay":
        raise IllegalComposition(
            "offload(delay=True) applies the gradients of the step before, as no other plan does. Compare the plan "
            "without delay"
        )
    whole = tree_map(lambda leaf: cast(leaf, plan), trial.batch)
    microbatches = cells(whole, plan)
    made = replay(plan, replace(trial, batch=whole))
    made.plan = with_owner(plan, trial.optimizer)
    if isinstance(made.error, ShardlibError) and not any(made.steps.values()):
        raise made.error
    device = OneDevice(plan, trial.loss_fn, trial.params, trial.optimizer, trial.rng)

    def views() -> Iterator[StepView]:
        for step in range(max(map(len, made.steps.values()), default=0)):
            evaluated = [device.evaluate(step, cell, part) for cell, part in enumerate(microbatches)]
            view = StepView(step, made, device, microbatches, evaluated)
            view.require_finite()
            yield view
            if made.plan.reductions.owner is not None:
                break  # its update is not that of one device

    return made, views()
