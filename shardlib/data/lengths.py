"""Batches of shorter sequences: cut off, or with what is cut off as rows of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from shardlib.errors import BatchError, listing
from shardlib.execute.uncut import hidden_in, uncut
from shardlib.tree import flatten, tree_map


def truncated(batch: Any, sequence: int, length: int) -> Any:
    """The first ``length`` positions of every tensor (rows, ``sequence``, …); other tensors as they are."""
    _require_sequence(batch, sequence)
    return tree_map(lambda leaf: leaf[:, :length].contiguous() if _is_sequence(leaf, sequence) else leaf, batch)


def reshaped(batch: Any, sequence: int, length: int) -> Any:
    """Tensors (rows, ``sequence``, …) as (rows·n, ``length``, …), where n = ⌊sequence/length⌋.

    The pieces of a row follow each other. Positions beyond the last whole piece are left out. Other tensors with rows are
    repeated for each piece.

    Raises:
        BatchError: leaves with rows that cannot be repeated; lists them.
    """
    rows, pieces = _require_sequence(batch, sequence), sequence // length
    if pieces > 1 and (failures := uncut(batch, rows)):
        raise BatchError(
            f"curriculum: surplus='reshape' makes {pieces} rows of each, and cannot of\n{listing(failures)}"
        )

    def cut(leaf: Any) -> Any:
        if _is_sequence(leaf, sequence):
            return leaf[:, : pieces * length].reshape(rows * pieces, length, *leaf.shape[2:])
        if isinstance(leaf, torch.Tensor) and leaf.dim() and len(leaf) == rows:
            return leaf.repeat_interleave(pieces, 0)
        return leaf

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


def _is_sequence(leaf: Any, sequence: int) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 1 and leaf.shape[1] == sequence


def _require_sequence(batch: Any, sequence: int) -> int:
    """The rows of the tensors that have a sequence.

    Raises:
        BatchError: there are none, or objects may hide some; lists what there is.
    """
    paths, leaves, _ = flatten(batch)
    if hidden := hidden_in(batch):
        raise BatchError(f"curriculum: sequences of {sequence} are made shorter, and not in\n{listing(hidden)}")
    found = [leaf.shape[0] for leaf in leaves if _is_sequence(leaf, sequence)]
    if not found:
        there = [
            f"{path or 'batch'}: {tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else type(leaf).__name__}"
            for path, leaf in zip(paths, leaves, strict=True)
        ]
        raise BatchError(
            f"curriculum: no tensor of the batch is (rows, {sequence}, …):\n{listing(there)}\nPass sl.data.curriculum the "
            "sequence that the dataset's rows have: sequence=..."
        )
    return found[0]
