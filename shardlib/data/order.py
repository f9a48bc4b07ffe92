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
from typing import Protocol

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
    """The indices at ``places`` of the permutation of 0 … size−1 that belongs to (seed, epoch); both int64.

    Raises:
        ValueError: more than 2^62 samples, or a seed of more than 64 bits.
    """
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
