"""Batches of shorter sequences: cut off, or with what is cut off as rows of their own.

Leaves are tensors or NumPy arrays, and stay what they are. By their shapes some of their dimensions count positions, and all
of these are cut: the one of (rows, S, …), where S is the sequence; both of masks (rows, S, S) and (rows, heads, S, S); and
the last of masks (rows, 1, S) and (rows, heads, 1, S).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from shardlib.errors import BatchError, listing
from shardlib.execute.batches import hidden_in, uncut
from shardlib.tree import flatten, tree_map

_SIGNED = frozenset({torch.bool, torch.int8, torch.int16, torch.int32, torch.int64})


def truncated(batch: Any, sequence: int, length: int) -> Any:
    """The first ``length`` positions of every leaf that has them; others as they are."""
    _require_sequence(batch, sequence)

    def cut(leaf: Any) -> Any:
        dims = _positions(leaf, sequence)
        if not dims:
            return leaf
        first = _window(leaf, dims, 0, length)
        return first.contiguous() if isinstance(first, torch.Tensor) else np.ascontiguousarray(first)

    return tree_map(cut, batch)


def reshaped(batch: Any, sequence: int, length: int) -> Any:
    """Leaves (rows, ``sequence``, …) as (rows·n, ``length``, …), where n = ⌊sequence/length⌋.

    The pieces of a row follow each other. Positions beyond the last whole piece are left out, and so is what a mask says of
    positions of other pieces. Other leaves with rows are repeated for each piece.

    Raises:
        BatchError: leaves with rows that cannot be repeated; lists them.
    """
    rows, pieces = _require_sequence(batch, sequence), sequence // length
    # Arrays, of any dtype, are cut here; in a step they are tensors by then.
    others = tree_map(lambda leaf: None if isinstance(leaf, np.ndarray) and leaf.ndim else leaf, batch)
    if pieces > 1 and (failures := uncut(others, rows)):
        raise BatchError(
            f"curriculum: surplus='reshape' makes {pieces} rows of each, and cannot of\n{listing(failures)}"
        )

    def cut(leaf: Any) -> Any:
        if dims := _positions(leaf, sequence):
            parts = [_window(leaf, dims, piece * length, length) for piece in range(pieces)]
            together = torch.stack(parts, 1) if isinstance(leaf, torch.Tensor) else np.stack(parts, 1)
            return together.reshape(len(leaf) * pieces, *together.shape[2:])
        if not _is_array(leaf) or not leaf.ndim or len(leaf) != rows:
            return leaf
        return leaf.repeat_interleave(pieces, 0) if isinstance(leaf, torch.Tensor) else np.repeat(leaf, pieces, 0)

    return tree_map(cut, batch)


class Surplus(NamedTuple):
    """What becomes of a row beyond the length: the change of a batch, and how many rows become of one, both of the dataset's
    sequence and the length."""

    change: Callable[[Any, int, int], Any]
    pieces: Callable[[int, int], int]


SURPLUS = {
    "truncate": Surplus(truncated, lambda sequence, length: 1),
    "reshape": Surplus(reshaped, lambda sequence, length: sequence // length),
}


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
    """The rows of the leaves that have a sequence.

    Raises:
        BatchError: there are none, objects may hide some, or it is not known of some; lists what there is.
    """
    if hidden := hidden_in(batch):
        raise BatchError(f"curriculum: sequences of {sequence} are made shorter, and not in\n{listing(hidden)}")
    paths, leaves, _ = flatten(batch)
    named = [(path or "batch", leaf) for path, leaf in zip(paths, leaves, strict=True)]
    if faults := [f"{path}: {_shown(leaf)}: {fault}" for path, leaf in named if (fault := _fault(leaf, sequence))]:
        raise BatchError(
            f"curriculum: which dimensions of these are the {sequence} positions is not clear:\n{listing(faults)}\nOr add "
            "them to the batch by sl.data.loader(map=...), after the cut."
        )
    found = [len(leaf) for leaf in leaves if _positions(leaf, sequence)[:1] == (1,)]
    if not found:
        raise BatchError(
            f"curriculum: no tensor of the batch is (rows, {sequence}, …):\n"
            f"{listing([f'{path}: {_shown(leaf)}' for path, leaf in named])}\nPass sl.data.curriculum the sequence that the "
            "dataset's rows have: sequence=..."
        )
    return found[0]


def _shown(leaf: Any) -> str:
    return f"{tuple(leaf.shape)} of {leaf.dtype}" if _is_array(leaf) else type(leaf).__name__
