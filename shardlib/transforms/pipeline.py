"""Pipeline stages: blocks cut over a mesh axis, micro-batches passed from stage to stage (GPipe, arXiv 1811.06965)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardlib import schedules
from shardlib.errors import IllegalComposition, listing
from shardlib.plan.arguments import axis_of, choice, integer, numbers, refused
from shardlib.plan.claims import Claim, LeafInfo, Step, Use
from shardlib.plan.code import CodeCall, CodedTransform
from shardlib.plan.conditions import require_split_gradients
from shardlib.plan.stages import NO_BLOCKS, Stages
from shardlib.plan.transform import Resolved
from shardlib.schedules.make import Spec
from shardlib.schedules.partition import Spans
from shardlib.transforms.accumulate import SYNC

Partition = str | tuple[float, ...] | re.Pattern[str]


@dataclass(frozen=True, repr=False)
class Pipelined(CodedTransform):
    """The transform that `pipeline` makes, with the arguments given there."""

    schedule: Spec
    microbatches: int
    axis: str
    chunks: int | None
    partition: Partition
    sync: str | None

    @property
    def call(self) -> CodeCall:
        return CodeCall(pipeline, vars(self))

    def claims(self, sizes: Mapping[str, int], leaves: Sequence[LeafInfo]) -> Iterable[Claim]:
        if self.axis not in sizes:
            # `check_axes` refuses the axis. Until then any schedule will do: there is no size to make the right one for.
            yield Step(stages=Stages(schedules.gpipe(1, 1), ((0, 1),), self.axis))
            return
        schedule = schedules.make_schedule(self.schedule, sizes[self.axis], self.microbatches, self.chunks)
        strange = [path for leaf in leaves for path in (leaf.path, *leaf.aliases) if not path.split("/")[0].isdigit()]
        if strange or not leaves:
            found = f"these paths belong to no block:\n{listing(strange, 5)}" if strange else "there are no parameters"
            raise IllegalComposition(NO_BLOCKS.format(found=found))
        blocks = [(leaf, {_block(path) for path in (leaf.path, *leaf.aliases)}) for leaf in leaves]
        spans = self._cut(blocks, schedule.stages)
        stage_of = {block: stage for stage, span in enumerate(spans) for block in range(*span)}
        used = [(leaf, tuple(sorted({stage_of[number] for number in numbers}))) for leaf, numbers in blocks]
        empty = set(range(schedule.stages)).difference(*(stages for _, stages in used))
        if empty:
            idle = [f"stage {s} (blocks {spans[s][0]} to {spans[s][1] - 1})" for s in sorted(empty)]
            raise IllegalComposition(
                f"{self.name} leaves stages without parameters:\n{listing(idle)}\nUse fewer stages, or another partition="
            )
        yield Step(microbatches=self.microbatches, sync=self.sync, stages=Stages(schedule, spans, self.axis))
        for leaf, stages in used:
            yield Use(leaf.path, stages=stages)

    def check(self, resolved: Resolved) -> None:
        require_split_gradients(resolved)

    def _cut(self, blocks: list[tuple[LeafInfo, set[int]]], stages: int) -> Spans:
        """The blocks of each stage. A tied leaf counts in every block that uses it, as every such block computes with it."""
        count = 1 + max(number for _, numbers in blocks for number in numbers)
        if self.partition == "count":
            return schedules.by_count(count, stages)
        if isinstance(self.partition, re.Pattern):
            names = [""] * count
            for leaf, _ in blocks:
                for path in (leaf.path, *leaf.aliases):
                    names[_block(path)] += f"{path}\n"
            return schedules.by_regex(names, self.partition, stages)
        costs: list[float] = [0] * count
        if isinstance(self.partition, tuple):
            if len(self.partition) < count:
                raise IllegalComposition(
                    f"{self.name}: partition= gives {len(self.partition)} costs for {count} blocks; give one per block"
                )
            costs = list(self.partition)
        else:
            for leaf, numbers in blocks:
                for number in numbers:
                    costs[number] += math.prod(leaf.shape)
        return schedules.by_cost(costs, stages)


def _block(path: str) -> int:
    return int(path.split("/")[0])


def pipeline(
    schedule: Spec = "1f1b",
    microbatches: int = 1,
    axis: str = "pipe",
    chunks: int | None = None,
    partition: str | Sequence[float] | re.Pattern[str] = "parameters",
    sync: str | None = None,
) -> Pipelined:
    """Cut the blocks of an `sl.sequential` into stages over ``axis`` and pass micro-batches through the stages.

    The parameters are a list of trees, one per block. Every rank along the axis is given the same batch.

    Args:
        schedule: "gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "zb-h1", "interleaved-zb", "zb-v", "dualpipe-v", or
            torch's name for one of these; or anything else that `shardlib.schedules.make_schedule` takes: a Schedule, lists
            of actions, CSV text or a file of it.
        microbatches: number of micro-batches that a rank's batch is cut into along dimension 0. If their sizes differ, the
            loss must be an `sl.Mean`.
        axis: mesh axis along which the stages lie.
        chunks: stages per rank of the interleaved schedules (2 by default).
        partition: how blocks become stages: "parameters" (the largest stage as small as possible), "count" (equally
            many blocks), one cost per block (`shardlib.report.measure_blocks` measures them), or a compiled regular
            expression (equally many blocks with a parameter whose path matches).
        sync: as for `accumulate`: gradients are reduced after "each" micro-batch (the default where they are split,
            ZeRO stages 2 and 3: least memory) or once, after the "last" (least traffic).

    Raises:
        IllegalComposition: arguments out of range; when a plan is made, parameters that are not a list of blocks, or a
            stage without parameters.
        ScheduleError: when a plan is made, more stages than blocks, or a schedule that cannot run on these sizes.

    >>> parallel = sl.pipeline("1f1b", microbatches=4)
    >>> blocks = [{"w": torch.ones(8, 8)} for _ in range(4)]
    >>> sl.make_plan(blocks, sl.abstract_mesh(data=1, pipe=2), parallel).stages.spans
    ((0, 2), (2, 4))
    """
    microbatches = integer("pipeline", "microbatches", microbatches)
    axis, sync = axis_of("pipeline", "axis", axis), choice("pipeline", "sync", sync, SYNC)
    chunks = None if chunks is None else integer("pipeline", "chunks", chunks)
    return Pipelined(_schedule(schedule), microbatches, axis, chunks, _partition(partition), sync)


def _partition(given: Any) -> Partition:
    """An argument ``partition`` in one form."""
    if isinstance(given, re.Pattern) or (isinstance(given, str) and given in ("parameters", "count")):
        return given
    costs = numbers(given)
    if costs is None:
        remedy = "use 'parameters', 'count', one cost per block, or re.compile(pattern)"
        raise refused("pipeline", "partition", given, remedy)
    return costs


def _schedule(given: Any) -> Spec:
    """An argument ``schedule`` in one form: tuples in place of lists, and of torch's dictionary of ranks."""
    if isinstance(given, str):
        return schedules.named_schedule(given) or str(given)
    if isinstance(given, (Path, schedules.Schedule)):
        return given
    try:
        ranks = [given[rank] for rank in sorted(given)] if isinstance(given, Mapping) else given
        actions = tuple(tuple(order) for order in ranks if not isinstance(order, str))
    except TypeError:
        actions = ()
    if not actions:
        remedy = (
            "use a schedule's name, a Schedule, lists of actions, CSV text or a path (shardlib.schedules.make_schedule)"
        )
        raise refused("pipeline", "schedule", given, remedy)
    return actions
