"""The order of samples while more and more of them may be drawn, without a stored list.

Samples have ranks, by difficulty, and those below a *limit*, which rises, may be drawn. An epoch has every sample at most
once. It ends when all that may be drawn have been, and samples that come under the limit join the epoch under way. So where
the limit rises, what is left of the epoch and the ranks that join become its pool from then on, in a permutation of their
own (`order.permuted`):

    places of pool k:  [ places d … of what was drawn from before | ranks from limit k−1 to limit k ]

The sample at a place is found by going back from pool to pool, until it is a rank that joined, or in an epoch that began
whole.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from shardlib.data.order import permuted
from shardlib.rng import Key


class _Phase(NamedTuple):
    """The samples while one limit holds: those of a pool, and then whole epochs.

    Attributes:
        limit: the number of ranks that may be drawn.
        epoch: the number of the pool's epoch.
        left: the number of places that the pool takes over; 0 where its epoch begins with it.
        drawn: the place of the first of them in what was drawn from before.
        within: whether that is the pool of the phase before; otherwise it is a whole epoch.
    """

    limit: int
    epoch: int
    joining: int
    left: int = 0
    drawn: int = 0
    within: bool = False

    @property
    def pool(self) -> int:
        return self.left + self.joining

    def after(self, samples: int, limit: int) -> _Phase:
        """The phase after ``samples`` of this one."""
        if samples < self.pool:
            source, epoch, drawn, within = self.pool, self.epoch, samples, True
        else:
            epochs, drawn = divmod(samples - self.pool, self.limit)
            source, epoch, within = self.limit, self.epoch + 1 + epochs, False
        if drawn == 0:
            return _Phase(limit, epoch, joining=limit)
        return _Phase(limit, epoch, limit - self.limit, source - drawn, drawn, within)


@dataclass(frozen=True)
class Growing:
    """The ranks of the samples of an endless stream.

    With one limit they are the indices of `order.Shuffled`.

    Attributes:
        starts: the numbers of the samples from which on each limit holds, from 0 on.
        limits: they rise.
        shuffle: whether a permutation is drawn; otherwise places keep their order.
    """

    starts: tuple[int, ...]
    limits: tuple[int, ...]
    seed: int
    shuffle: bool

    @cached_property
    def _phases(self) -> list[_Phase]:
        phases = [_Phase(self.limits[0], epoch=0, joining=self.limits[0])]
        for start, end, limit in zip(self.starts, self.starts[1:], self.limits[1:]):
            phases.append(phases[-1].after(end - start, limit))
        return phases

    def end(self, epochs: int) -> int:
        """The number of samples in the first ``epochs`` epochs: of all that may be drawn, where each of them ends."""
        ends = (
            start + phase.pool + (epochs - 1 - phase.epoch) * phase.limit
            for start, phase in zip(self.starts, self._phases)
        )
        # An epoch that does not end within a phase goes on in the next one.
        return next(end for end, until in zip(ends, [*self.starts[1:], math.inf]) if end <= until)

    def ranks(self, numbers: np.ndarray) -> np.ndarray:
        """The ranks of the samples at int64 ``numbers``; of the same shape."""
        found = np.empty_like(numbers)
        phases = np.searchsorted(self.starts, numbers, side="right") - 1
        for number in np.unique(phases).tolist():
            phase, here = self._phases[number], phases == number
            places = numbers[here] - self.starts[number]
            ranks, in_pool = np.empty_like(places), places < phase.pool
            ranks[in_pool] = self._of_pool(number, places[in_pool])
            epochs, rest = np.divmod(places[~in_pool] - phase.pool, phase.limit)
            whole = np.empty_like(rest)
            for epoch in np.unique(epochs).tolist():
                whole[epochs == epoch] = self._drawn(
                    rest[epochs == epoch], phase.limit, self.seed, phase.epoch + 1 + epoch
                )
            ranks[~in_pool] = whole
            found[here] = ranks
        return found

    def _of_pool(self, number: int, places: np.ndarray) -> np.ndarray:
        """The ranks at places of the pool of phase ``number``."""
        ranks, asked = np.empty_like(places), np.arange(len(places))
        while True:
            phase = self._phases[number]
            if not phase.left:
                ranks[asked] = self._drawn(places, phase.limit, self.seed, phase.epoch)
                return ranks
            places = self._drawn(places, phase.pool, Key(self.seed).fold_in(f"pool {number}").seed, phase.epoch)
            joined = places >= phase.left
            ranks[asked[joined]] = places[joined] - phase.left + phase.limit - phase.joining
            asked, places = asked[~joined], places[~joined] + phase.drawn
            number -= 1
            if not phase.within:
                ranks[asked] = self._drawn(places, self._phases[number].limit, self.seed, phase.epoch)
                return ranks

    def _drawn(self, places: np.ndarray, size: int, seed: int, epoch: int) -> np.ndarray:
        return permuted(places, size, seed, epoch) if self.shuffle else places
