"""What the stages of a pipeline do and hold, as vectors with one number for each stage."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardlib.plan.records import Trace
from shardlib.schedules.partition import Spans
from shardlib.search.model import BlockCosts, BucketCost

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class Bytes:
    """Bytes of a rank, if nothing is split over the data axis.

    Attributes:
        stored: of parameters.
        trained: of those that are trained.
        gradients, states: of their gradients, and of the optimizer's states.
        alone: of gradients that nothing but the data axis reduces.
    """

    stored: Vector
    trained: Vector
    gradients: Vector
    states: Vector
    alone: Vector


class Backward(NamedTuple):
    """Bytes at some point of a backward.

    Attributes:
        reduced: of gradients on their way to other ranks.
        reducing: with what is still kept.
        in_use: also with parameters, if these come for their use alone.
    """

    reduced: Vector
    reducing: Vector
    in_use: Vector


@dataclass(frozen=True)
class StageCosts:
    """Stages of blocks that are computed in one way.

    Attributes:
        kept, between, live: bytes, as in a trace.
        gathered: bytes that a forward holds if parameters come for their use alone: what it has kept so far, with
            the unit in use and the one before it.
        stay, land: what a backward holds if gradients are split over ranks, and stay on the device or land elsewhere.
        forward, backward: bytes that go to the next stage, and that come back from there.
        flops, launches, streamed: of a micro-batch's forward and of its backward, as in a trace.
        activations, collectives: by axis, as in a trace.
        held: number of ways in which other axes divide what is split -> bytes that are divided so.
        unit: bytes of parameters of the smallest unit; `piece` if all other axes divide them.
        share: of the stage's elements that its smallest unit has.
        again: share of what a forward gathers that backward gathers too, at least.
        buckets, trained: number of buckets, and of those that are trained.
    """

    kept: Vector
    between: Vector
    live: Vector
    gathered: Vector
    stay: Backward
    land: Backward
    forward: Vector
    backward: Vector
    flops: tuple[Vector, Vector]
    launches: tuple[Vector, Vector]
    streamed: tuple[Vector, Vector]
    activations: Mapping[str, Vector]
    collectives: Mapping[str, Vector]
    held: Mapping[int, Bytes]
    unit: Vector
    piece: Vector
    share: Vector
    again: Vector
    buckets: Vector
    trained: Vector

    @property
    def count(self) -> int:
        return len(self.kept)

    def bytes(self, of: Callable[[Bytes], Vector], data: int = 1, split: bool = False) -> Vector:
        """Bytes of a rank.

        Args:
            data: size of the data axis.
            split: whether it splits them.
        """
        whole = (of(held) / (data * ways if split else 1) for ways, held in self.held.items())
        return sum(whole, np.zeros(self.count))


def stages_of(blocks: BlockCosts, traces: tuple[Trace, ...], spans: Spans) -> StageCosts:
    """The stages of some blocks with traces for some number of rows."""
    inner = [blocks.stage(traces, *span) for span in spans]
    held = [blocks.shared(*span) for span in spans]

    def both(of: Callable[[Trace], tuple[int, int]]) -> tuple[Vector, Vector]:
        forward, backward = _vectors([of(trace) for trace in inner])
        return forward, backward

    def by_axis(of: Callable[[Trace], Mapping[str, int]]) -> dict[str, Vector]:
        axes = dict.fromkeys(axis for trace in inner for axis in of(trace))
        return {axis: _vector([of(trace).get(axis, 0) for trace in inner]) for axis in axes}

    gathered = [_gathered(blocks, traces, *span) for span in spans]
    stay, land = (
        Backward(*_vectors([_reducing(blocks, traces, *span, lands) for span in spans])) for lands in (False, True)
    )
    unit, piece, share = _vectors([_units(each) for each in held])
    buckets, trained = _vectors([(len(stage), sum(bucket.gradient > 0 for bucket in stage)) for stage in held])
    return StageCosts(
        kept=_vector([trace.kept for trace in inner]),
        between=_vector([trace.between for trace in inner]),
        live=_vector([trace.live for trace in inner]),
        gathered=_vector(gathered),
        stay=stay,
        land=land,
        forward=_vector([trace.forward for trace in inner]),
        backward=_vector([trace.backward for trace in inner]),
        flops=both(lambda trace: trace.flops),
        launches=both(lambda trace: trace.launches),
        streamed=both(lambda trace: trace.streamed),
        activations=by_axis(lambda trace: trace.activations),
        collectives=by_axis(lambda trace: trace.collectives),
        held={ways: _bytes(held, ways) for ways in dict.fromkeys(bucket.ways for stage in held for bucket in stage)},
        unit=unit,
        piece=piece,
        share=share,
        again=_vector([1.0 if start else _again(blocks.held[0], stage) for (start, _), stage in zip(spans, held)]),
        buckets=buckets,
        trained=trained,
    )


def _gathered(blocks: BlockCosts, traces: tuple[Trace, ...], start: int, stop: int) -> float:
    """See `StageCosts.gathered`."""
    if blocks.whole:
        return traces[0].kept + _units(blocks.held[0])[0]
    before = most = 0.0
    for number, kept in zip(range(start, stop), _kept(traces, start, stop), strict=True):
        here = _units(blocks.held[number])[0]
        most, before = max(most, kept + before + here), here
    return most


def _reducing(
    blocks: BlockCosts, traces: tuple[Trace, ...], start: int, stop: int, lands: bool
) -> tuple[float, float, float]:
    """See `Backward`. As in `shardlib.execute.gradients`, where links are as slow as can be: the first ones must arrive while
    more than two units' elements are on their way, or more than one unit if gradients land elsewhere."""
    if blocks.whole:  # nobody knows in which order its units come
        one = max((bytes for _, bytes in _trained(blocks.held[0], {})), default=0)
        return one, one, one
    held = blocks.held[start:stop]
    used = Counter(bucket.name for block in held for bucket in block)
    units, stored = [_trained(block, used) for block in held], [_units(block)[0] for block in held]
    largest = max((elements for block in held for elements, _ in _trained(block, {})), default=0)
    # What is kept by the blocks before; what comes from them may be gone.
    kept = [count - trace.forward for count, trace in zip(_kept(traces, start, stop), traces[start:stop], strict=True)]
    most, flying = (0.0, 0.0, 0.0), deque[tuple[int, int]]()
    for number in reversed(range(len(held))):
        before = kept[number - 1] if number else 0
        beside = min(stored[number - 1], stored[number + 1]) if 0 < number < len(held) - 1 else 0.0
        for unit in reversed(units[number]):
            flying.append(unit)
            bytes = sum(bytes for _, bytes in flying)
            reduced, reducing, in_use = most
            here = bytes + before
            most = max(reduced, bytes), max(reducing, here), max(in_use, here + stored[number] + beside)
            while len(flying) > 1 if lands else sum(elements for elements, _ in flying) > 2 * largest:
                flying.popleft()
    return most


def _kept(traces: tuple[Trace, ...], start: int, stop: int) -> list[int]:
    """Bytes kept of a stage's forward after each of its blocks."""
    more = (traces[n].kept - (traces[n - 1].forward if n > start else 0) for n in range(start, stop))
    return list(itertools.accumulate(more))


def _trained(buckets: Sequence[BucketCost], used: Mapping[str, int]) -> list[tuple[int, int]]:
    """Elements of each unit, and bytes of their gradients, without those that other stages or several blocks use."""
    units: dict[str, tuple[int, int]] = {}
    for bucket in buckets:
        if bucket.gradient and bucket.alone and used.get(bucket.name, 1) == 1:
            elements, bytes = units.get(bucket.unit, (0, 0))
            units[bucket.unit] = elements + bucket.elements, bytes + bucket.gradient
    return list(units.values())


def _units(buckets: Sequence[BucketCost]) -> tuple[float, float, float]:
    """The bytes of the smallest unit, those if all axes divide them, and its share of the elements."""
    units: dict[str, list[float]] = {}
    for bucket in buckets:
        sums = units.setdefault(bucket.unit, [0.0, 0.0, 0.0])
        for position, size in enumerate((bucket.stored, bucket.stored / bucket.ways, bucket.elements)):
            sums[position] += size
    stored, pieces, elements = zip(*units.values(), strict=True) if units else ((0.0,), (0.0,), (1.0,))
    return min(stored), min(pieces), min(elements) / max(1.0, sum(elements))


def _again(first: Sequence[BucketCost], stage: Sequence[BucketCost]) -> float:
    """The share of a stage's bytes, and of its buckets, that a backward gathers at least: nobody may need the gradient of
    what is given to one unit of the ``first`` block."""
    least, numbers = 1.0, [lambda held: held.stored, lambda held: held.stored / held.ways, lambda held: 1.0]
    for of in numbers:
        units = Counter[str]()
        for bucket in first:
            units[bucket.unit] += of(bucket)
        whole = sum(map(of, stage))
        least = min(least, 1 - max(units.values(), default=0.0) / whole if whole else 1.0)
    return max(0.0, least)


def _bytes(held: Sequence[Sequence[BucketCost]], ways: int) -> Bytes:
    def of(bucket: BucketCost) -> tuple[float, ...]:
        trained = bucket.stored if bucket.gradient else 0
        return bucket.stored, trained, bucket.gradient, bucket.states, bucket.gradient if bucket.alone else 0

    rows = [[of(bucket) for bucket in stage if bucket.ways == ways] for stage in held]
    return Bytes(*_vectors([[sum(column) for column in zip((0,) * 5, *row)] for row in rows]))


def _vectors(rows: Sequence[Sequence[float]]) -> list[Vector]:
    return [_vector(column) for column in zip(*rows, strict=True)]


def _vector(values: Sequence[float]) -> Vector:
    return np.array(values, np.float64)
