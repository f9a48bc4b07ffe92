"""The order of samples: a permutation per epoch, computed for any sample at once, without a stored list.

A generalised Feistel network (Black, Rogaway, "Ciphers with arbitrary finite domains", 2002) permutes the a·b cells of a
grid with a ≈ b ≈ √N that just holds N samples. A round shifts each column by an amount that depends on the column, the next
round shifts each row likewise:

    row ← row + F₁(column) mod a,    column ← column + F₂(row) mod b,    and so on

A cell outside the N samples is permuted again until it falls inside ("cycle walking"; fewer than one sample in √N needs it).
The shifts are bits of a counter hash whose keys come from the seed and the epoch by SHAKE-128. There is nothing in it that a
version of a library could change, and a test keeps a table of its values.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np

from shardlib.rng import Key

# Below 16, some orders of a handful of samples come measurably more often than others.
_ROUNDS = 16
_LARGEST = 2**62  # samples; rows and columns then fit 32 bits


class Order(Protocol):
    """The dataset's index of every sample of an endless stream."""

    def indices(self, numbers: np.ndarray) -> np.ndarray:
        """The indices of the samples at int64 ``numbers``, which count from 0 through all epochs; of the same shape."""


class Epochs(Order, Protocol):
    """An order whose stream is one of epochs, which may differ in size."""

    def end(self, epochs: int) -> int:
        """The number of samples in the first ``epochs`` of them, one or more."""


@dataclass(frozen=True)
class Shuffled:
    """Epoch after epoch of ``size`` samples, each epoch in an order of its own that depends on (seed, epoch) alone."""

    size: int
    seed: int

    def indices(self, numbers: np.ndarray) -> np.ndarray:
        found = np.empty_like(numbers)
        epochs, places = np.divmod(numbers, self.size)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            found[here] = permuted(places[here], self.size, self.seed, int(epoch))
        return found

    def end(self, epochs: int) -> int:
        return epochs * self.size


@dataclass(frozen=True)
class Unshuffled:
    """Epoch after epoch of ``size`` samples in the order of their indices."""

    size: int

    def indices(self, numbers: np.ndarray) -> np.ndarray:
        return numbers % self.size

    def end(self, epochs: int) -> int:
        return epochs * self.size


def permuted(places: np.ndarray, size: int, seed: int, epoch: int) -> np.ndarray:
    """The indices at ``places`` of the permutation of 0 … size−1 that belongs to (seed, epoch); both int64. Raises
    `ValueError` for more than 2^62 samples, or a seed of more than 64 bits."""
    if size > _LARGEST:
        raise ValueError(f"an order of {size} samples, and 2^62 are the most")
    # With an even number of rows a shift of one column can be an odd permutation, so that no order is out of reach.
    rows = math.isqrt(size - 1) + 1
    rows += rows % 2
    columns = -(-size // rows)
    keys, grid = _keys(seed, epoch), (np.uint64(rows), np.uint64(columns))
    cells = _permute_grid(places.astype(np.uint64), keys, *grid)
    outside = np.flatnonzero(cells >= size)
    while outside.size:
        again = _permute_grid(cells[outside], keys, *grid)
        cells[outside] = again
        outside = outside[again >= size]
    return cells.astype(np.int64)


def _keys(seed: int, epoch: int) -> np.ndarray:
    """A 64-bit key for each round."""
    digest = hashlib.shake_128(f"shardlib order, seed {Key(seed).seed}, epoch {epoch}".encode()).digest(8 * _ROUNDS)
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def _permute_grid(cells: np.ndarray, keys: np.ndarray, rows: np.uint64, columns: np.uint64) -> np.ndarray:
    row, column = np.divmod(cells, columns)
    for index, key in enumerate(keys):
        if index % 2 == 0:
            row += _shifts(column, key, rows)
            row -= rows * (row >= rows)
        else:
            column += _shifts(row, key, columns)
            column -= columns * (column >= columns)
    return row * columns + column


def _shifts(x: np.ndarray, key: np.uint64, size: np.uint64) -> np.ndarray:
    """A number in [0, size) for each x: the upper 32 bits of SplitMix64's mixing function of x + key, scaled to the size."""
    bits = x + key
    bits ^= bits >> np.uint64(30)
    bits *= np.uint64(0xBF58476D1CE4E5B9)
    bits ^= bits >> np.uint64(27)
    bits *= np.uint64(0x94D049BB133111EB)
    bits >>= np.uint64(32)
    bits *= size
    bits >>= np.uint64(32)
    return bits


# The order of samples while more and more of them may be drawn, without a stored list.
#
# Samples have ranks, by difficulty, and those below a *limit*, which rises, may be drawn. An epoch has every sample at most
# once. It ends when all that may be drawn have been, and samples that come under the limit join the epoch under way. So where
# the limit rises, what is left of the epoch and the ranks that join become its pool from then on, in a permutation of their
# own (`permuted`):
#
#     places of pool k:  [ places d … of what was drawn from before | ranks from limit k−1 to limit k ]
#
# The sample at a place is found by going back from pool to pool, until it is a rank that joined, or in an epoch that began
# whole.


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
