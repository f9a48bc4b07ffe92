"""One step of a plan beside the same step on one device: what the parts of a step are compared by."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cached_property
from typing import Any

import torch

from shardlib.debug.difference import Difference, difference
from shardlib.debug.finding import Finding, worst
from shardlib.debug.layout import best_part, coords_of, inner_axes, number, segments, shards
from shardlib.debug.notes import NotedCall, NotedRun
from shardlib.debug.one_device import Evaluated, Leaves, OneDevice, mean_gradient
from shardlib.debug.replay import RankStep, Replay
from shardlib.errors import NonFiniteError
from shardlib.plan.buckets import Bucket
from shardlib.plan.plan import Plan
from shardlib.tree import Tree


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

    def coords(self, rank: int) -> dict[str, int]:
        return coords_of(self.plan.sizes, rank)

    def cells_of(self, rank: int) -> list[int]:
        """The numbers of a rank's micro-batches."""
        first = number(self.plan.batch_axes, self.plan.sizes, self.coords(rank)) * self.plan.step.microbatches
        return list(range(first, first + self.plan.step.microbatches))

    @cached_property
    def weighted(self) -> bool:
        """Whether the loss is a `Mean`, whose weights are summed."""
        return any(e.run.weight is not None and float(e.run.weight) != 1 for e in self.evaluated)

    @cached_property
    def mean(self) -> tuple[float, Mapping[str, torch.Tensor], float]:
        """Loss, gradient and weight on one device: see `mean_gradient`."""
        return mean_gradient(self.evaluated, self.weighted)

    def require_finite(self) -> None:
        """Refuse a step from which one device makes no update, as nothing would be compared.

        Raises:
            NonFiniteError: its loss or gradient is not finite; names the step and the first leaf.
        """
        loss, grads, _ = self.mean
        what = next((f"the gradient of {path}" for path, grad in grads.items() if not grad.isfinite().all()), "")
        if what or not math.isfinite(loss):
            raise NonFiniteError(
                f"step {self.number}: {what or 'the loss'} is not finite on one device (loss {loss:g}), so that there is "
                "nothing to compare: give parameters and a batch with finite ones, or fewer steps"
            )

    def runs(self, cell: int) -> dict[int, list[NotedRun]]:
        """Rank -> its runs of a micro-batch, in the order of the stages."""
        return {
            rank: [runs[first] for first in sorted(runs)]
            for rank, runs in self.replay.of_cell(self.number, cell).items()
        }

    def in_parts(self, bucket: Bucket) -> bool:
        """Whether ranks that work on one micro-batch have parts of a bucket's gradient, which one device does not show."""
        sequence, placed = self.plan.step.sequence, [self.plan.placement_of[path] for path in bucket.paths]
        summed = {each.style.axis for each in placed if each.style and each.style.sums} | {
            *bucket.axes,
            *bucket.replicas,
        }
        return bool({*summed, *([sequence.axis] if sequence else [])} & {*inner_axes(self.plan)})

    def finding(self, phase: str, operation: str, bad: tuple[tuple[int, ...], Difference], **more: Any) -> Finding:
        ranks, apart = bad
        return Finding(phase, operation, self.number, apart, ranks, **more)

    def cell_finding(
        self, phase: str, operation: str, bad: tuple[tuple[int, ...], Difference], cell: int, **more: Any
    ) -> Finding:
        return self.finding(phase, operation, bad, microbatch=cell, **more)

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
                    narrow = bucket.reduce_dtype if level == "grad" else None
                    yield bucket, path, rank, difference(got, due.to(got.dtype), narrow), got, due

    def first_leaf(
        self, wholes: Mapping[str, torch.Tensor], found: Mapping[int, Mapping[str, torch.Tensor]], level: str
    ) -> tuple[Bucket, str, tuple[tuple[int, ...], Difference]] | None:
        """The first leaf whose shares differ, in the plan's order, and how; None if none does."""
        of_leaf: dict[str, tuple[Bucket, list[tuple[int, Difference]]]] = {}
        for bucket, path, rank, apart, _, _ in self.of_buckets(wholes, found, level):
            of_leaf.setdefault(path, (bucket, []))[1].append((rank, apart))
        for placement in self.plan.placements:
            if placement.path in of_leaf:
                bucket, differences = of_leaf[placement.path]
                if bad := worst(differences):
                    return bucket, placement.path, bad
        return None

    def assembled(self, found: Mapping[int, Mapping[str, torch.Tensor]], level: str) -> Leaves:
        """Path -> whole leaf, from the ranks' shares."""
        shapes = {p.path: p.compute.shape for p in self.plan.placements}
        indices = {path: torch.arange(1, math.prod(shape) + 1).view(shape) for path, shape in shapes.items()}
        wholes: Leaves = {}
        for _, path, _, _, got, index in self.of_buckets(indices, found, level):
            whole = wholes.setdefault(path, got.new_zeros(math.prod(shapes[path])))
            whole[index[index > 0] - 1] = got[index > 0]
        return {path: whole.view(shapes[path]) for path, whole in wholes.items()}

    def aligned(self, cell: int) -> dict[int, dict[int, NotedCall]]:
        """Rank -> number of a call on one device -> the same call on the rank."""
        wanted = self.evaluated[cell].run.calls
        found = {}
        for rank, runs in self.runs(cell).items():
            blocks = {number for run in runs for number in run.blocks}
            several = bool(self.plan.stages.axes)
            numbers = [n for n, call in enumerate(wanted) if not several or call.block in blocks]
            calls = [call for run in runs for call in run.calls]
            match = SequenceMatcher(
                None, [_name(wanted[n]) for n in numbers], [_name(call) for call in calls], autojunk=False
            )
            found[rank] = {
                numbers[same.a + step]: calls[same.b + step]
                for same in match.get_matching_blocks()
                for step in range(same.size)
            }
        return found

    def apart(self, rank: int, found: list[Any], wanted: list[Any], factor: float | None = None) -> Difference | None:
        """The largest difference of a rank's tensors from their parts of the whole ones; None if they are not alike."""
        if len(found) != len(wanted):
            return None
        largest: Difference | None = None
        for mine, whole in zip(found, wanted):
            if mine is None or whole is None:
                continue
            whole = whole if factor is None else whole * factor
            each = best_part(self.plan, mine, whole, self.coords(rank))
            if each is not None and (largest is None or each > largest):
                largest = each
        return largest


def _name(call: NotedCall) -> tuple[int | None, str]:
    return call.block, call.name
