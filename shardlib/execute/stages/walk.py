"""What one micro-batch was seen to do, and from it the trace of a function that has more blocks like some of its own."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from shardlib.execute.counting import Stretch
from shardlib.execute.phases import Phase
from shardlib.nn.blocks import Sequential
from shardlib.plan.plan import Plan
from shardlib.plan.records import Trace
from shardlib.plan.value import PlanValue

Repeats = Mapping[int, int]  # number of a block, from 1 -> how many more like it follow
_ONCE: Repeats = {}
_ALONE: Mapping[str, Sequence[str]] = {}


class Peak(NamedTuple):
    """The most bytes that were alive at once, and the phase in which they were, if any were. Of several phases, the first."""

    bytes: int
    phase: Phase | None

    def or_higher(self, other: Peak) -> Peak:
        """The higher of two peaks; of equal ones, this one."""
        return other if other.bytes > self.bytes else self


def peak_of(stretches: Iterable[Stretch]) -> Peak:
    """The peak of what happened, stretch by stretch."""
    live, peak = 0, Peak(0, None)
    for phase, rise, net in stretches:
        if live + rise > peak.bytes:
            peak = Peak(live + rise, phase)
        live += net
    return peak


@dataclass(frozen=True)
class Walk:
    """What one micro-batch of a function was seen to do on one stage, whose blocks count from 1.

    Attributes:
        alone: for each run of a micro-batch alone, what happened to memory, gradients of parameters left out.
        summed: for each run, what happened to all memory: also of runs of several of a step's micro-batches.
        done: phase -> what was done in it, by name: see `shardlib.execute.counting.WorkCount`.
        touches: units in the order they are gathered, in forward and in backward.
        reduced: trained units in the order in which their gradients are complete.
        carries: of each block what the carry that it is given is like, where the function is a sequence of blocks.
        blocks: how many blocks ran.
        summands: as in a trace.
        arrived: bytes of the carry that came from the stage before.
        kept, between, forward, backward: as in a trace.
        again: as in a trace; nothing in stages, as blocks are given whole leaves.
        assumptions: as in a trace.
    """

    alone: Sequence[Sequence[Stretch]]
    summed: Sequence[Sequence[Stretch]]
    done: Mapping[Phase, Mapping[Any, int]]
    touches: tuple[tuple[str, ...], tuple[str, ...]]
    reduced: tuple[str, ...]
    carries: Sequence[Any]
    blocks: int
    summands: int = 0
    arrived: int = 0
    kept: int = 0
    between: int = 0
    forward: int = 0
    backward: int = 0
    again: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()

    def trace(self, first: int = 0, repeats: Repeats = _ONCE, stands: Mapping[str, Sequence[str]] = _ALONE) -> Trace:
        """The trace; or that of the same function with more blocks.

        Args:
            first: number of blocks in the stages before.
            repeats: of blocks that are `steady`.
            stands: path of the parameters of each block -> the paths that those of the blocks which it stands for have.
        """

        def highest(runs: Sequence[Sequence[Stretch]]) -> Peak:
            peak = Peak(0, None)
            for run in runs:
                peak = peak.or_higher(peak_of(self._with_more(run, repeats)))
            return peak

        totals: dict[Any, list[int]] = {}  # in forward, and in backward
        for phase, done in self.done.items():
            times = 1 + repeats.get(self._block(phase), 0)
            for name, count in done.items():
                totals.setdefault(name, [0, 0])[phase.backward] += times * count
        live, peak = highest(self.alone), highest(self.summed)

        def more(bytes: int, visits: int) -> int:
            """What blocks leave after some visits, as was seen, with those that are like them."""
            return bytes and bytes + sum(count * self._left(block, visits) for block, count in repeats.items())

        forward, backward = self.touches
        return Trace(
            (tuple(_touched(forward, stands)), tuple(_touched(backward, stands, back=True))),
            {name.axis: sum(both) for name, both in totals.items() if isinstance(name, SentBytes)},
            live.bytes + self.arrived,
            peak.bytes + self.arrived,
            more(self.kept, 1),
            more(self.between, 2),
            self.forward,
            self.backward,
            flops=_pair(totals.get("flops")),
            launches=_pair(totals.get("launches")),
            streamed=_pair(totals.get("streamed")),
            collectives={name.axis: sum(both) for name, both in totals.items() if isinstance(name, Called)},
            live_in=_named(live.phase, first),
            peak_in=_named(peak.phase, first),
            blocks=self.blocks + sum(repeats.values()),
            summands=self.summands,
            again=self.again,
            assumptions=self.assumptions,
            reduced=tuple(_touched(self.reduced, stands, back=True)),
            **{name: sum(totals.get(name, ())) for name in ("down", "up", "host")},
        )

    def steady(self, block: int, leaving: int = 0) -> bool:
        """Whether a block and the next one did the same, one right after the other, so that more may come between.

        Args:
            leaving: bytes of its gradients that may stay until all blocks' have left.
        """
        if self.again:
            return False
        if self.carries and self.carries[block - 1] != self.carries[block]:
            return False
        left = {sum(part.net for part in run if self._block(part.phase) == block) for run in self.alone}
        if not left <= {0, leaving}:
            return False  # what it has made is freed by what comes after all blocks
        here = [(phase, done) for phase, done in self.done.items() if self._block(phase) == block]
        after = {phase: done for phase, done in self.done.items() if self._block(phase) == block + 1}
        if len(here) != len(after) or any(after.get(_later(phase, 1)) != done for phase, done in here):
            return False
        for run in (*self.alone, *self.summed):
            visits = list(self._visits(run))
            places = [at for at, (number, _) in enumerate(visits) if number == block]
            if not places or any(_onwards(visits, at) is None for at in places):
                return False
        return True

    def _left(self, block: int, visits: int) -> int:
        """Bytes that the first visits of a block leave: its forward, and the backward that may be half of it."""
        seen = (parts for number, parts in self._visits(self.alone[0]) if number == block)
        return sum(part.net for parts in itertools.islice(seen, visits) for part in parts)

    def _block(self, phase: Phase) -> int:
        """The number of the block that a phase belongs to; 0 for what comes before all blocks or after them."""
        between = phase.place == "of what follows" and phase.block < self.blocks
        return phase.block if phase.place == "of" or between else 0

    def _visits(self, run: Iterable[Stretch]) -> Iterator[tuple[int, list[Stretch]]]:
        """The stretches of each block, forward or backward, with its number; and what comes between."""
        for (_, block), parts in itertools.groupby(
            run, key=lambda part: (part.phase.backward, self._block(part.phase))
        ):
            yield block, list(parts)

    def _with_more(self, run: Iterable[Stretch], repeats: Repeats) -> Iterator[Stretch]:
        """A run with the blocks that others are like, once for each of these."""
        visits = list(self._visits(run))
        for at, (block, parts) in enumerate(visits):
            place = block or parts[0].phase.block
            past = sum(count for other, count in repeats.items() if other < place)
            numbers = range(past, past + repeats.get(block, 0) + 1)
            for number in numbers if len(numbers) == 1 or _onwards(visits, at) else reversed(numbers):
                yield from (_moved(part, number) for part in parts)


@dataclass(frozen=True)
class SentBytes:
    """The name of payload bytes that the loss function sends along an axis."""

    axis: str


@dataclass(frozen=True)
class Called:
    """The name of collectives that the loss function calls along an axis."""

    axis: str


def _onwards(visits: Sequence[tuple[int, list[Stretch]]], at: int) -> bool | None:
    """Whether the next block follows on a block and does the same; False if it comes right before it, and None if neither.

    Visits of what belongs to no block do not count.
    """
    block, parts = visits[at]
    like = block + 1, [_moved(part, 1) for part in parts]
    after = next((visit for visit in visits[at + 1 :] if visit[0]), None)
    if after == like:
        return True
    before = next((visit for visit in reversed(visits[:at]) if visit[0]), None)
    return False if before == like else None


def _pair(both: Sequence[int] | None) -> tuple[int, int]:
    forward, backward = both or (0, 0)
    return forward, backward


def _named(phase: Phase | None, first: int) -> str:
    """The name of a phase, whose block has that many in stages before it; "" for none."""
    return "" if phase is None else str(_later(phase, first))


def _later(phase: Phase, count: int) -> Phase:
    """A phase of a block that comes ``count`` later."""
    return phase._replace(block=phase.block + count) if phase.block else phase


def _moved(part: Stretch, count: int) -> Stretch:
    return part._replace(phase=_later(part.phase, count))


def _touched(touches: Sequence[str], stands: Mapping[str, Sequence[str]], back: bool = False) -> Iterator[str]:
    """The touches of units with those of more blocks, each as those of the block that stands for it: forward in the order of
    blocks, and backward in the reverse of it."""
    depth = next((path.count("/") + 1 for path in stands), 0)

    def home(unit: str) -> str:
        return "/".join(unit.split("/")[:depth])

    for path, group in itertools.groupby(touches, key=home):
        units, paths = list(group), stands.get(path, [path])
        for each in reversed(paths) if back else paths:
            yield from (each + unit.removeprefix(path) for unit in units)


# Stages that are alike: equal functions over equally treated parameters. One of them is traced for all.


def kinds_of(plan: Plan, blocks: Sequential) -> list[list[Any]]:
    """For each stage what it does, without its blocks' numbers: stages of equal kinds are alike if their carries are."""
    named = _names(plan)
    return [
        [
            blocks.functions[start:stop],
            *_treated(plan, stage, {name: str(place) for place, name in enumerate(named[start:stop])}),
        ]
        for stage, (start, stop) in enumerate(plan.stages.spans)
    ]


def as_another(walk: Walk, plan: Plan, stage: int, other: int) -> Walk:
    """The walk of one stage as that of another one like it: with its units."""
    ours, theirs = (plan.of_stage(number).tiled.buckets for number in (stage, other))
    units = {bucket.unit: like.unit for bucket, like in zip(ours, theirs, strict=True)}
    forward, backward, reduced = (tuple(units[unit] for unit in some) for some in (*walk.touches, walk.reduced))
    return replace(walk, touches=(forward, backward), reduced=reduced)


def _names(plan: Plan) -> list[str]:
    """The name of each block in the list: its number, in a short form that in the whole; "" without parameters."""
    starts, start = [], 0
    for child in plan.shape.treedef.children():
        starts.append(plan.shape.paths[start].partition("/")[0] if child.num_leaves else "")
        start += child.num_leaves
    return starts


def _treated(plan: Plan, stage: int, places: dict[str, str]) -> list[Any]:
    """What a plan does with a stage's parameters. What several stages share keeps its names, and is like nothing else.

    Args:
        places: name of each of the stage's blocks -> its place among them.
    """
    view = plan.of_stage(stage)
    found: list[Any] = []
    alone = {bucket.name for bucket in view.buckets if len(bucket.stages) == 1}
    units = {unit: str(place) for place, unit in enumerate(view.units)}  # which may be of several blocks

    def local(path: str) -> str:
        block, slash, rest = path.partition("/")
        return f"{places.get(block, block)}{slash}{rest}"

    for bucket in view.buckets:
        if bucket.name in alone:
            bucket = replace(
                bucket,
                name="",
                unit=units[bucket.unit],
                paths=tuple(map(local, bucket.paths)),
                stages=(0,),
                homes=(0,),
            )
        found.append(bucket)
    for placement in _placements(view):
        name = local if placement.bucket in alone else str
        leaf = replace(placement.compute, path=name(placement.path))
        found.append((leaf, list(map(name, placement.aliases)), placement.style, placement.dealt))
    tiles = plan.step.module_tiles.items()
    return [*found, {local(path): number for path, number in tiles if path.partition("/")[0] in places}]


def _placements(view: PlanValue) -> list[Any]:
    return [view.placement_of[path] for bucket in view.buckets for path in bucket.paths]
