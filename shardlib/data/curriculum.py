"""Curricula: what each step reads, as a function of the step: how many rows, how long, and which samples they may be of."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from shardlib.data.growing import Growing
from shardlib.data.index import Index, IndexFile
from shardlib.data.lengths import SURPLUS
from shardlib.data.order import Epochs
from shardlib.data.pace import Pace, as_pace, constant_pace, map_paces
from shardlib.errors import BatchError
from shardlib.optim.checks import is_step


def curriculum(
    batch: int | Pace,
    *,
    length: Pace | None = None,
    sequence: int | None = None,
    surplus: str = "truncate",
    difficulty: Any = None,
    up_to: Pace | None = None,
    percentile: bool = False,
) -> Curriculum:
    """What each step reads, for `loader`, which takes it in place of the number of rows.

    It changes nothing by itself: a loader's whole state is still the number of samples consumed, from which it goes on on any
    number of ranks. Paces are functions of the step: `linear_pace`, `root_pace`, `discrete_pace`, `custom_pace`.

    Args:
        batch: rows of each global batch, counted in samples of the dataset: their number, or a pace (batch-size warm-up).
        length: the length of sequences at each step (arXiv 2108.06084). Tensors and arrays (rows, ``sequence``, …) of
            a batch are cut, and masks on both sides.
        sequence: the length of the dataset's sequences; by default the last one of ``length``.
        surplus: what becomes of a row beyond the length: "truncate" leaves it out; "reshape" makes further rows of it, as
            many as are whole, so that a step keeps its tokens.
        difficulty: a number for each sample: an array or list, an `Index`, or the file of one (`analyze`).
        up_to: the difficulty up to which samples may be drawn, which must not fall.
        percentile: whether ``up_to`` is percent of the samples, the easiest first, in place of a difficulty.

    Raises:
        BatchError: arguments that do not go together, or out of range; a step at which no sample may be drawn.

    >>> rows = sl.data.curriculum(2, length=sl.data.discrete_pace([2, 4], until=[9]), surplus="reshape")
    >>> batches = iter(sl.data.loader(torch.arange(16).reshape(4, 4), sl.make_mesh(), rows, shuffle=False))
    >>> next(batches).tolist()
    [[0, 1], [2, 3], [4, 5], [6, 7]]
    >>> rows.tokens(9), rows.tokens(20)
    (72, 160)

    The easiest samples first:

    >>> rows = sl.data.curriculum(2, difficulty=[3, 1, 2, 9, 8], up_to=sl.data.discrete_pace([3, 9], until=[0]))
    >>> batches = iter(sl.data.loader(["a", "b", "c", "d", "e"], sl.make_mesh(), rows, shuffle=False))
    >>> next(batches), next(batches)
    (['b', 'c'], ['a', 'e'])
    """
    rows = as_pace(batch, "curriculum", "batch")
    if surplus not in SURPLUS:
        raise BatchError(f"curriculum: surplus={surplus!r}: use {' or '.join(map(repr, SURPLUS))}")
    if sequence is not None and not is_step(sequence):
        raise BatchError(f"curriculum: sequence={sequence!r}: give the length of the dataset's sequences, at least 1")
    if not isinstance(percentile, bool):
        raise BatchError(f"curriculum: percentile={percentile!r}: use True or False")
    if length is not None:
        length = as_pace(length, "curriculum", "length")
        sequence = length.values[-1] if sequence is None else sequence
        if max(length.values) > sequence:
            raise BatchError(
                f"curriculum: a length of {max(length.values)}, and the dataset's sequences have sequence={sequence}: let "
                "the pace end there"
            )
    if (difficulty is None) != (up_to is None):
        raise BatchError("curriculum: difficulty and up_to go together: give both, or neither")
    if difficulty is None:
        return Curriculum(rows, length, sequence, surplus)
    index = _index(difficulty)
    return Curriculum(rows, length, sequence, surplus, index, _limits(index, up_to, percentile))


@dataclass(frozen=True)
class Curriculum:
    """What each step reads; from `curriculum`.

    Attributes:
        rows: the pace of the rows of a global batch, in samples of the dataset.
        length: the pace of sequences' lengths; None where they are never cut.
        sequence: the length of the dataset's sequences, where it was given.
        surplus: "truncate" or "reshape".
        index: the metric by which samples are drawn; None where all may be drawn at every step.
        limits: the pace of the number of samples, the easiest first, that may be drawn.
    """

    rows: Pace
    length: Pace | None = None
    sequence: int | None = None
    surplus: str = "truncate"
    index: Index | None = None
    limits: Pace | None = None

    def tokens(self, step: Any) -> Any:
        """The number of tokens in all batches before ``step``; for a tensor of steps, a tensor. A function of the step for
        `optim.token_schedule`.

        Raises:
            BatchError: the length of sequences is not known.
        """
        return self._tokens.total(step)

    def tokens_at(self, step: int) -> int:
        """The number of tokens in the batch of ``step``."""
        return self._tokens(step)

    @property
    def shapes(self) -> tuple[Pace, Pace]:
        """The paces of the number of sequences in a batch, where pieces of a row count each, and of their length.

        Raises:
            BatchError: the length of sequences is not known.
        """
        whole = self.sequence
        if whole is None:
            raise BatchError("curriculum: its tokens depend on the length of sequences: give sequence=...")
        length, pieces = self.length or constant_pace(whole), SURPLUS[self.surplus].pieces
        return map_paces(lambda rows, length: rows * pieces(whole, length), self.rows, length), length

    @cached_property
    def _tokens(self) -> Pace:
        return map_paces(operator.mul, *self.shapes)

    def change(self, batch: Any, step: int) -> Any:
        """The batch with sequences of the step's length."""
        if self.length is None or self.sequence is None:
            return batch
        return SURPLUS[self.surplus].change(batch, self.sequence, self.length(step))

    def order(self, dataset: Any, seed: int, shuffle: bool) -> Epochs:
        """The order in which samples of a dataset may be drawn; of a curriculum with an index.

        Raises:
            BatchError: the index is of another dataset.
        """
        assert self.index is not None and self.limits is not None
        if len(self.index) != len(dataset):
            raise BatchError(
                f"curriculum: difficulties of {len(self.index)} samples, and the dataset has {len(dataset)}: make an index "
                "of this dataset, with the same sequence"
            )
        self.index.require_of(getattr(dataset, "identity", None))
        starts = tuple(self.rows.total(start) for start in self.limits.starts)
        return _Eligible(Growing(starts, self.limits.values, seed, shuffle), self.index.samples)


@dataclass(frozen=True)
class _Eligible:
    """The samples that have the ranks of a `Growing` order."""

    ranks: Growing
    samples: np.ndarray

    def indices(self, numbers: np.ndarray) -> np.ndarray:
        return self.samples[self.ranks.ranks(numbers)].astype(np.int64)

    def end(self, epochs: int) -> int:
        return self.ranks.end(epochs)


def as_curriculum(batch: Any) -> Curriculum:
    """A curriculum; of a number or a pace, that of so many rows."""
    return batch if isinstance(batch, Curriculum) else Curriculum(as_pace(batch, "loader", "batch"))


def _index(difficulty: Any) -> Index:
    if isinstance(difficulty, (str, Path)):
        return IndexFile(difficulty)
    return difficulty if isinstance(difficulty, Index) else Index(difficulty)


def _limits(index: Index, up_to: Any, percentile: bool) -> Pace:
    """The number of samples that may be drawn at each step."""
    if not isinstance(up_to, Pace):
        raise BatchError(f"curriculum: up_to={up_to!r}: use a pace, such as sl.data.linear_pace(1, 100, steps=1000)")
    size = len(index)
    if percentile and not 0 < min(up_to.values) <= max(up_to.values) <= 100:
        raise BatchError(
            f"curriculum: percentiles from {min(up_to.values)} to {max(up_to.values)}: use those above 0 and up to 100"
        )
    limits = map_paces(lambda value: -int(-size * value // 100) if percentile else index.up_to(value), up_to)
    if limits.values[0] == 0:
        least = index.values[index.samples[0]]
        raise BatchError(
            f"curriculum: no sample has a difficulty of up to {up_to(0)}, where the pace begins; the easiest has {least}: "
            "begin there, or use percentile=True"
        )
    for start, before, after in zip(limits.starts[1:], limits.values, limits.values[1:]):
        if after < before:
            raise BatchError(
                f"curriculum: at step {start} the samples that may be drawn fall from {before} to {after}, and a curriculum "
                "lets none out again: let up_to rise"
            )
    return limits
