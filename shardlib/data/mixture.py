"""A mixture of datasets by weights: which source a sample comes from is a function of its number.

The sources follow each other in a fixed pattern whose length is the weights' common denominator Q. With wₛ = mₛ/Q, the j-th
sample of source s may stand from place ⌊j·Q/mₛ⌋ on and must stand before ⌈(j+1)·Q/mₛ⌉. Taking at each place the source whose
time runs out first keeps all these bounds (earliest deadline first, which is optimal for unit jobs on one machine: Liu,
Layland 1973; Baruah et al. 1996). So after any n samples the number from source s differs from n·wₛ by less than 1.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from shardlib.data.order import Order, Shuffled, Unshuffled
from shardlib.data.rows import as_dataset, collated
from shardlib.errors import BatchError, listing
from shardlib.optim.checks import is_positive
from shardlib.rng import Key
from shardlib.tree import tree_map

_LONGEST = 2**16  # places of a pattern


def mixture(sources: Sequence[Any], weights: Sequence[float | Fraction] | None = None) -> Mixture:
    """A dataset that takes its samples from several datasets, in proportion to ``weights``, for `loader`.

    After any number n of samples, source s has given n·wₛ of them, up to less than one. Every source goes through epochs of
    its own, each with every sample once. Samples of all sources must collate into one batch.

    Args:
        sources: map-style datasets, as `loader` takes them; mixtures too, which keep their proportions.
        weights: one above 0 for each source, as numbers or fractions; they need not sum to 1. By default the sources' sizes.
            Where their smallest common denominator is above 65,536 they are rounded to 65,536ths; `Mixture.weights` are
            those that are used.

    Raises:
        BatchError: other numbers of weights than of sources, weights that are not above 0, or a source that `loader` refuses.

    >>> mix = sl.data.mixture([list(range(10)), list(range(100, 200))], weights=[0.75, 0.25])
    >>> batch = next(iter(sl.data.loader(mix, sl.make_mesh(), batch=8)))
    >>> int((batch < 100).sum()), int((batch >= 100).sum())
    (6, 2)
    """
    datasets = [as_dataset(source) for source in sources]
    if not datasets:
        raise BatchError("mixture: no sources; pass at least one dataset")
    sizes = [len(dataset) for dataset in datasets]
    return Mixture(datasets, _shares(sizes if weights is None else weights, len(datasets)))


class Mixture:
    """Datasets one behind the other, and the order in which a loader takes samples from them; from `mixture`.

    Attributes:
        weights: each source's share of the samples; they sum to 1.
    """

    def __init__(self, sources: Sequence[Any], shares: tuple[int, ...]) -> None:
        self._sources, self._shares = sources, shares
        self._starts = np.cumsum([0, *map(len, sources)])
        self.weights: tuple[Fraction, ...] = tuple(Fraction(share, sum(shares)) for share in shares)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> Any:
        source = int(np.searchsorted(self._starts, index, side="right")) - 1
        return self._sources[source][index - int(self._starts[source])]

    def rows_at(self, indices: np.ndarray) -> Any:
        """The batch of the samples at ``indices``: whole arrays at once if every source reads them so."""
        if not all(hasattr(source, "rows_at") for source in self._sources):
            return collated([self[index] for index in indices.tolist()])
        source_of = np.searchsorted(self._starts, indices, side="right") - 1
        chosen = np.unique(source_of)
        parts = [self._sources[s].rows_at(indices[source_of == s] - self._starts[s]) for s in chosen]
        places = torch.from_numpy(np.concatenate([np.flatnonzero(source_of == s) for s in chosen]))
        return tree_map(lambda *leaves: torch.cat(leaves)[places.argsort()], *parts)

    def order(self, seed: int, shuffle: bool) -> MixedOrder:
        seeds = (Key(seed).fold_in(f"source {number}").seed for number in range(len(self._sources)))
        orders = (_order(source, own, shuffle) for source, own in zip(self._sources, seeds))
        return MixedOrder(tuple(orders), tuple(map(len, self._sources)), self._shares)


@dataclass(frozen=True)
class MixedOrder:
    """The order of a mixture's samples, by those of its sources. ``shares`` of their sum are the sources' weights."""

    orders: tuple[Order, ...]
    sizes: tuple[int, ...]
    shares: tuple[int, ...]

    def indices(self, numbers: np.ndarray) -> np.ndarray:
        pattern, before = _pattern(self.shares)
        rounds, places = np.divmod(numbers, len(pattern))
        sources, found = pattern[places], np.empty_like(numbers)
        start = 0
        for source, (own, size, share) in enumerate(zip(self.orders, self.sizes, self.shares)):
            here = sources == source
            found[here] = start + own.indices(rounds[here] * share + before[places[here]])
            start += size
        return found


def _order(source: Any, seed: int, shuffle: bool) -> Order:
    """The order of a source's samples: its own, as a mixture has one."""
    if (own := getattr(source, "order", None)) is not None:
        return own(seed, shuffle)
    return Shuffled(len(source), seed) if shuffle else Unshuffled(len(source))


@lru_cache(maxsize=16)
def _pattern(shares: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """For each place of the pattern its source, and how many places before it have the same source."""
    length = sum(shares)
    sources, before = np.empty(length, np.int64), np.empty(length, np.int64)
    ready: list[tuple[int, int, int]] = []  # (deadline, source, number of the source's sample)
    waiting = [(0, source, 0) for source in range(len(shares))]  # (place from which it may stand, source, number)
    for place in range(length):
        while waiting and waiting[0][0] <= place:
            _, source, number = heapq.heappop(waiting)
            heapq.heappush(ready, (-(-(number + 1) * length // shares[source]), source, number))
        _, source, number = heapq.heappop(ready)
        sources[place], before[place] = source, number
        heapq.heappush(waiting, ((number + 1) * length // shares[source], source, number + 1))
    return sources, before


def _shares(weights: Sequence[float | Fraction], count: int) -> tuple[int, ...]:
    """Whole numbers in the proportions of the weights, with a sum of at most 65,536."""
    many = len(weights) if hasattr(weights, "__len__") else repr(weights)
    if many != count:
        raise BatchError(f"mixture: {many} weights for {count} sources; give one for each")
    wrong = [f"source {source}: {weight!r}" for source, weight in enumerate(weights) if not is_positive(weight)]
    if wrong:
        raise BatchError(f"mixture: weights are numbers above 0:\n{listing(wrong)}\nLeave out sources without samples.")
    exact = [weight if isinstance(weight, Fraction) else Fraction(str(weight)) for weight in weights]
    common = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * common) for weight in exact]
    whole = [weight // math.gcd(*whole) for weight in whole]
    total = sum(whole)
    if total <= _LONGEST:
        return tuple(whole)
    rounded = [max(1, weight * _LONGEST // total) for weight in whole]
    # What rounding down has left goes to those that it took most from.
    lost = sorted(range(count), key=lambda source: rounded[source] - Fraction(whole[source] * _LONGEST, total))
    for source in lost[: max(0, _LONGEST - sum(rounded))]:
        rounded[source] += 1
    return tuple(rounded)
