"""Metrics of samples, by which a curriculum may draw them: the number of tokens, how rare they are, or a user's function."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from shardlib.data.rows import as_array
from shardlib.errors import BatchError

_TOKENS = ("tokens", "input_ids")
# What says which positions hold tokens, and whether a value of it does.
_HELD: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "segments": lambda segments: segments >= 0,  # of `packed`
    "attention_mask": lambda mask: mask != 0,
}

_ROWS = 256  # of a batch: some hundred thousand tokens, which a cache holds


class Metric(ABC):
    """A number for each sample, of the samples of a batch at once."""

    @abstractmethod
    def of_rows(self, tokens: np.ndarray, held: np.ndarray) -> np.ndarray:
        """The value of each row, (rows,) float64.

        Args:
            tokens: (rows, sequence), integers.
            held: (rows, sequence) booleans: whether a position holds a token.
        """


class Length(Metric):
    """The number of tokens of a sample."""

    def of_rows(self, tokens: np.ndarray, held: np.ndarray) -> np.ndarray:
        return held.sum(1).astype(np.float64)


class Rarity(Metric):
    """The mean of −log p over a sample's tokens, in nats, where p is a token's share of all tokens (arXiv 1903.09848, 3.1,
    where it is the sum); 0 for a sample without tokens.

    Args:
        counts: how often each token occurs.
    """

    def __init__(self, counts: np.ndarray) -> None:
        with np.errstate(divide="ignore", invalid="ignore"):
            self._nats = np.log(counts.sum()) - np.log(counts)

    def of_rows(self, tokens: np.ndarray, held: np.ndarray) -> np.ndarray:
        # What pads may be no token at all: larger than all of them, or negative.
        total = np.where(held, self._nats[np.where(held, tokens, 0)], 0.0).sum(1)
        return total / np.maximum(held.sum(1), 1)


def counts_of(dataset: Any, first: int, last: int) -> np.ndarray:
    """How often each token occurs in samples ``first`` to ``last`` − 1, up to the largest one; as float64."""
    counts = np.zeros(1, np.int64)
    for start, end in _batches(first, last):
        tokens, held = _rows_of(dataset, start, end)
        if negative := np.flatnonzero(((tokens < 0) & held).any(1)).tolist():
            raise BatchError(
                f"analyze: sample {start + negative[0]} has negative tokens: leave out what pads by an attention_mask"
            )
        counts = added(counts, np.bincount(tokens[held]))
    return counts.astype(np.float64)


def added(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """The sum of counts of tokens, of which one may be of more tokens."""
    total = np.zeros(max(len(one), len(other)), one.dtype)
    total[: len(one)] += one
    total[: len(other)] += other
    return total


def values_of(dataset: Any, metric: Metric | Callable[[Any], float], first: int, last: int) -> np.ndarray:
    """The metric of samples ``first`` to ``last`` − 1, float64."""
    if not isinstance(metric, Metric):
        return np.array([_value_of(metric, dataset, index) for index in range(first, last)])
    return np.concatenate([metric.of_rows(*_rows_of(dataset, *ends)) for ends in _batches(first, last)])


def read(dataset: Any, first: int, last: int, rows: bool) -> None:
    """Read samples ``first`` to ``last`` − 1 as `values_of` and `counts_of` do.

    Args:
        rows: whether as many at once as they do for a `Metric`.
    """
    if rows and hasattr(dataset, "rows_at"):
        for ends in _batches(first, last):
            dataset.rows_at(np.arange(*ends))
    else:
        for index in range(first, last):
            dataset[index]


def _batches(first: int, last: int) -> Iterator[tuple[int, int]]:
    """The first sample of each batch that is read at once, and the first beyond it."""
    return ((start, min(start + _ROWS, last)) for start in range(first, last, _ROWS))


def _value_of(function: Callable[[Any], float], dataset: Any, index: int) -> float:
    found = function(dataset[index])
    try:
        return float(found)
    except (TypeError, ValueError):
        raise BatchError(f"analyze: the metric of sample {index} is {found!r}: it must be a number") from None


def _rows_of(dataset: Any, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of some samples as rows, and which positions hold one."""
    if hasattr(dataset, "rows_at"):
        return _found(dataset.rows_at(np.arange(first, last)), first, 2)
    samples = [_found(dataset[index], index, 1) for index in range(first, last)]
    shape = len(samples), max(len(tokens) for tokens, _ in samples)
    rows, held = np.zeros(shape, np.int64), np.zeros(shape, bool)
    for number, (tokens, holds) in enumerate(samples):
        rows[number, : len(tokens)], held[number, : len(tokens)] = tokens, holds
    return rows, held


def _found(sample: Any, number: int, dims: int) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of a sample (or a batch of them, with two dimensions), and which positions hold one."""
    tokens, held = sample, None
    if isinstance(sample, Mapping):
        tokens = next((sample[name] for name in _TOKENS if name in sample), None)
        held = next((is_held(as_array(sample[name])) for name, is_held in _HELD.items() if name in sample), None)
    tokens = as_array(tokens)
    if tokens.ndim != dims or (tokens.size and tokens.dtype.kind not in "iu"):
        has = ", ".join(map(repr, sample)) if isinstance(sample, Mapping) else type(sample).__name__
        raise BatchError(
            f"analyze: sample {number} has no tokens that can be found ({has}): give a list of integers, or a dictionary "
            f"with {' or '.join(map(repr, _TOKENS))}; or use a function as the metric"
        )
    if held is not None and held.shape != tokens.shape:
        raise BatchError(
            f"analyze: sample {number} has tokens of shape {tokens.shape}, and a mask of {held.shape}: give "
            "attention_mask or segments the tokens' shape"
        )
    return tokens, np.ones(tokens.shape, bool) if held is None else held
