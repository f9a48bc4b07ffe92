"""Curricula: what each step reads, as a function of the step: how many rows, how long, and which samples they may be of."""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardlib.data.files import Index, IndexFile
from shardlib.data.order import Epochs, Growing
from shardlib.data.pace import Pace, as_pace, constant_pace, map_paces
from shardlib.errors import BatchError, listing
from shardlib.execute.batches import hidden_in, uncut
from shardlib.optim.checks import is_step
from shardlib.plan.drops import TokenDrop
from shardlib.tree import flatten, tree_map

_SURPLUS = ("truncate", "reshape")
_SIGNED = frozenset({torch.bool, torch.int8, torch.int16, torch.int32, torch.int64})


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
    if surplus not in _SURPLUS:
        raise BatchError(f"curriculum: surplus={surplus!r}: use {' or '.join(map(repr, _SURPLUS))}")
    if sequence is not None and not is_step(sequence):
        raise BatchError(f"curriculum: sequence={sequence!r}: give the length of the dataset's sequences, at least 1")
    if not isinstance(percentile, bool):
        raise BatchError(f"curriculum: percentile={percentile!r}: use True or False")
    if length is not None:
        length = as_pace(length, "curriculum", "length")
        sequence = length.values[-1] if sequence is None else sequence
        if max(length.values) > sequence:
            raise BatchError(
                f"curriculum: a length of {max(length.values)}, and the dataset's have sequence={sequence}: let the pace end "
                "there"
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
        length = self.length or constant_pace(whole)
        return map_paces(lambda rows, length: rows * self._pieces(whole, length), self.rows, length), length

    def _pieces(self, sequence: int, length: int) -> int:
        """The rows that become of one of the dataset's."""
        return sequence // length if self.surplus == "reshape" else 1

    @cached_property
    def _tokens(self) -> Pace:
        return map_paces(operator.mul, *self.shapes)

    def change(self, batch: Any, step: int) -> Any:
        """The batch with sequences of the step's length."""
        if self.length is None or self.sequence is None:
            return batch
        length = self.length(step)
        return _shortened(batch, self.sequence, length, self._pieces(self.sequence, length))

    def order(self, dataset: Any, seed: int, shuffle: bool) -> Epochs:
        """The order in which samples of a dataset may be drawn; of a curriculum with an index.

        Raises:
            BatchError: the index is of another dataset.
        """
        assert self.index is not None and self.limits is not None
        if len(self.index) != len(dataset):
            raise BatchError(
                f"curriculum: difficulties of {len(self.index)} samples, and the dataset has {len(dataset)}: make an "
                "index of this dataset, with the same sequence"
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
        raise BatchError(f"curriculum: percentiles from {min(up_to.values)} to {max(up_to.values)}: use (0, 100]")
    limits = map_paces(lambda value: -int(-size * value // 100) if percentile else index.up_to(value), up_to)
    if limits.values[0] == 0:
        least = index.values[index.samples[0]]
        raise BatchError(
            f"curriculum: no sample has a difficulty of up to {up_to(0)}, where the pace begins, and the easiest {least}: "
            "begin there, or use percentile=True"
        )
    for start, before, after in zip(limits.starts[1:], limits.values, limits.values[1:]):
        if after < before:
            raise BatchError(
                f"curriculum: at step {start} the samples that may be drawn fall from {before} to {after}: let up_to rise"
            )
    return limits


def layer_tokens(drop: TokenDrop, plan: Curriculum) -> Pace:
    """Tokens that all layers see at each step together, under `shardlib.random_ltd` (arXiv 2211.11586, section 3).

    ``sl.optim.token_schedule(schedule, sl.data.layer_tokens(drop, plan).total)`` makes a schedule of consumed layer-tokens
    from any schedule.

    Args:
        drop: ``plan.step.token_drop`` of a plan.
        plan: what each step reads, on all ranks together: ``sl.data.curriculum(rows, sequence=length)`` where all steps
            read the same, or with lengths or rows that grow.

    Raises:
        BatchError: ``drop`` is no schedule of a plan, or ``plan`` no curriculum; the plan's number of kept tokens is a
            function that is not a pace, as `linear_pace` makes one; the length of sequences is not known.

    >>> params, ltd = {"blocks": [{"w": torch.ones(2)} for _ in range(12)]}, sl.random_ltd(sl.data.linear_pace(16, 64, 6, 8))
    >>> drop = sl.make_plan(params, sl.make_mesh(), ltd).step.token_drop
    >>> sl.data.layer_tokens(drop, sl.data.curriculum(4, sequence=64)).total(8)
    17856
    """
    if not isinstance(drop, TokenDrop):
        raise BatchError(
            f"layer_tokens: drop={drop!r}: give plan.step.token_drop of a plan that leaves out tokens, by sl.random_ltd"
        )
    if not isinstance(plan, Curriculum):
        raise BatchError(
            f"layer_tokens: plan={plan!r}: give what each step reads, such as sl.data.curriculum(rows, sequence=length)"
        )
    kept = as_pace(drop.kept, "layer_tokens", "kept")
    return map_paces(
        lambda count, rows, length: replace(drop, kept=count).layer_tokens(0, rows, length), kept, *plan.shapes
    )


# Batches of shorter sequences: cut off, or with what is cut off as rows of their own. Leaves are tensors or NumPy arrays, and
# stay what they are. By their shapes some of their dimensions count positions, and all of these are cut: the one of
# (rows, S, …), where S is the sequence; both of masks (rows, S, S) and (rows, heads, S, S); and the last of masks
# (rows, 1, S) and (rows, heads, 1, S).


def _shortened(batch: Any, sequence: int, length: int, pieces: int) -> Any:
    """Leaves (rows, ``sequence``, …) as (rows·``pieces``, ``length``, …).

    The pieces of a row follow each other. Positions beyond the last one are left out, and so is what a mask says of positions
    of other pieces. Other leaves with rows are repeated for each piece; those that cannot be are refused.
    """
    rows = _require_sequence(batch, sequence)
    # Arrays, of any dtype, are cut here; in a step they are tensors by then.
    others = tree_map(lambda leaf: None if isinstance(leaf, np.ndarray) and leaf.ndim else leaf, batch)
    if pieces > 1 and (failures := uncut(others, rows)):
        raise BatchError(
            f"curriculum: surplus='reshape' makes {pieces} rows of each, and cannot of\n{listing(failures)}"
        )

    def cut(leaf: Any) -> Any:
        if dims := _positions(leaf, sequence):
            parts = [_window(leaf, dims, piece * length, length) for piece in range(pieces)]
            if pieces == 1:
                return parts[0].contiguous() if isinstance(leaf, torch.Tensor) else np.ascontiguousarray(parts[0])
            together = torch.stack(parts, 1) if isinstance(leaf, torch.Tensor) else np.stack(parts, 1)
            return together.reshape(len(leaf) * pieces, *together.shape[2:])
        if pieces == 1 or not _is_array(leaf) or not leaf.ndim or len(leaf) != rows:
            return leaf
        return leaf.repeat_interleave(pieces, 0) if isinstance(leaf, torch.Tensor) else np.repeat(leaf, pieces, 0)

    return tree_map(cut, batch)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (torch.Tensor, np.ndarray))


def _positions(leaf: Any, sequence: int) -> tuple[int, ...]:
    """The dimensions of a leaf that count positions; none of what has no sequence."""
    shape = tuple(leaf.shape[1:]) if _is_array(leaf) else ()
    if shape == (sequence, sequence):
        return (1, 2)
    if len(shape) == 3 and shape[1:] == (sequence, sequence) and shape[0] != sequence:
        return (2, 3)
    if shape[:1] == (sequence,):
        return (1,)
    return (len(shape),) if len(shape) in (2, 3) and shape[-2:] == (1, sequence) else ()


def _fault(leaf: Any, sequence: int) -> str | None:
    """Why nobody knows by a leaf's shape which of its dimensions count positions."""
    shape = tuple(leaf.shape[1:]) if _is_array(leaf) else ()
    if len(shape) not in (2, 3) or shape[-2:] != (sequence, sequence):
        return None
    mask = leaf.dtype in _SIGNED if isinstance(leaf, torch.Tensor) else leaf.dtype.kind in "bi"
    if len(shape) == 2:
        of_tokens = f"values of each token are (rows, {sequence}, 1, {sequence})"
        return None if mask else f"a mask of numbers is (rows, 1, {sequence}, {sequence}), {of_tokens}"
    if shape[0] == sequence:
        return "give fewer heads, or flatten the last two dimensions of what is no mask"
    if shape[0] == 1 or mask:
        return None
    return "a mask of numbers has one head for all; flatten the last two dimensions of what is no mask"


def _window(leaf: Any, dims: tuple[int, ...], start: int, length: int) -> Any:
    """Positions from ``start`` on."""
    return leaf[tuple(slice(start, start + length) if dim in dims else slice(None) for dim in range(leaf.ndim))]


def _require_sequence(batch: Any, sequence: int) -> int:
    """The rows of the leaves that have a sequence. Raises `BatchError` if there are none, or it is not known of some."""
    if hidden := hidden_in(batch):
        raise BatchError(f"curriculum: sequences of {sequence} are made shorter, and not in\n{listing(hidden)}")
    paths, leaves, _ = flatten(batch)
    named = [(path or "batch", leaf) for path, leaf in zip(paths, leaves, strict=True)]
    if faults := [f"{path}: {_shown(leaf)}: {fault}" for path, leaf in named if (fault := _fault(leaf, sequence))]:
        raise BatchError(
            f"curriculum: which dimensions of these are the {sequence} positions is not clear:\n{listing(faults)}\nOr add "
            "them after the cut, by sl.data.loader(map=...)."
        )
    found = [len(leaf) for leaf in leaves if _positions(leaf, sequence)[:1] == (1,)]
    if not found:
        shown = listing([f"{path}: {_shown(leaf)}" for path, leaf in named])
        raise BatchError(
            f"curriculum: no tensor of the batch is (rows, {sequence}, …):\n{shown}\nGive the dataset's own: sequence=..."
        )
    return found[0]


def _shown(leaf: Any) -> str:
    return f"{tuple(leaf.shape)} of {leaf.dtype}" if _is_array(leaf) else type(leaf).__name__
