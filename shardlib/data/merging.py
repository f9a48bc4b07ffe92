"""The merging of sorted parts into one order, in bounded memory."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from shardlib.data.index import Index


@dataclass(frozen=True)
class _RankRun:
    """The ranks from ``low`` to before ``high`` of a part, whose samples are numbered from ``first`` on."""

    part: Index
    first: int
    low: int
    high: int

    @property
    def size(self) -> int:
        return self.high - self.low

    def value(self, rank: int) -> float:
        return float(self.part.values[self.part.samples[rank]])

    def until(self, rank: int) -> _RankRun:
        return replace(self, high=rank)

    def since(self, rank: int) -> _RankRun:
        return replace(self, low=rank)

    def samples(self, low: int, high: int) -> np.ndarray:
        """Numbers of the samples at ranks, as int64."""
        return self.part.samples[low:high].astype(np.int64) + self.first


def merged(parts: Sequence[Index], room: int) -> Iterator[np.ndarray]:
    """The samples of all parts in the order of their values, those of one value in their own order, as arrays.

    Where the parts have more than ``room`` samples they are divided at one of the values, as quicksort does, which for sorted
    parts takes a look-up in each.

    Args:
        parts: of samples that follow each other.
        room: the number of samples that are sorted, or read, at once.
    """
    firsts = accumulate((len(part) for part in parts), initial=0)
    left = [[_RankRun(part, first, 0, len(part)) for part, first in zip(parts, firsts)]]
    while left:
        runs = [run for run in left.pop() if run.size]
        if sum(run.size for run in runs) <= room:
            yield _sorted(runs)
            continue
        largest = max(runs, key=lambda run: run.size)
        pivot = largest.value((largest.low + largest.high) // 2)
        below = [bisect.bisect_left(range(run.high), pivot, run.low, key=run.value) for run in runs]
        up_to = [bisect.bisect_right(range(run.high), pivot, run.low, key=run.value) for run in runs]
        if not any(start > run.low for start, run in zip(below, runs)):  # what is next has the pivot's value
            for run, end in zip(runs, up_to):
                for low in range(run.low, end, room):
                    yield run.samples(low, min(low + room, end))
            left.append([run.since(end) for run, end in zip(runs, up_to)])
        else:
            left.append([run.since(start) for run, start in zip(runs, below)])
            left.append([run.until(start) for run, start in zip(runs, below)])


def _sorted(runs: Sequence[_RankRun]) -> np.ndarray:
    if not runs:
        return np.empty(0, np.int64)
    values = [run.part.values[run.part.samples[run.low : run.high]] for run in runs]
    samples = [run.samples(run.low, run.high) for run in runs]
    return np.concatenate(samples)[np.argsort(np.concatenate(values), kind="stable")]
