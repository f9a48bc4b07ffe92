"""Datasets over tokens: windows of a token file, and documents packed into rows."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shardlib.data.files import TokenFile, checksum_of, tokens_in
from shardlib.data.rows import RowsDataset
from shardlib.errors import BatchError, listing

IGNORED = -100  # the target of positions without one, as in F.cross_entropy


def tokens(path: str | Path, sequence: int) -> Windows:
    """Windows of ``sequence`` tokens of a token file, one behind the other, as a dataset for `loader`.

    A batch is ``{"tokens": (rows, sequence), "targets": same}``, int64, targets one token ahead. Windows run across
    documents; `packed` keeps them apart.

    Raises:
        BatchError: the file has no window with the token that follows it.
        TokenFileError: no token file, or a damaged one.

    >>> _ = sl.data.write_tokens("text.tokens", [b"to be or not to be"])
    >>> dataset = sl.data.tokens("text.tokens", sequence=4)
    >>> len(dataset), bytes(dataset[0]["targets"].tolist())
    (4, b'o be')
    """
    return Windows(TokenFile(path), sequence)


class Windows(RowsDataset):
    """The dataset of `tokens`."""

    def __init__(self, file: TokenFile, sequence: int) -> None:
        self._file, self._sequence = file, sequence
        _require_length("tokens", sequence)
        if len(file) <= sequence:
            raise BatchError(
                f"tokens: {file.path} has {len(file)} tokens, and a window of sequence={sequence} takes one more; use "
                "shorter ones, or sl.data.packed"
            )

    @property
    def identity(self) -> str:
        """What an index of this dataset is of."""
        return f"windows of {self._sequence} of {self._file.header['blake2b']}"

    def __len__(self) -> int:
        return (len(self._file) - 1) // self._sequence

    def rows_at(self, indices: np.ndarray) -> dict[str, torch.Tensor]:
        places = indices[:, None] * self._sequence + np.arange(self._sequence + 1)
        rows = torch.from_numpy(self._file.tokens[places].astype(np.int64))
        return {"tokens": rows[:, :-1].contiguous(), "targets": rows[:, 1:].contiguous()}


def packed(
    documents: str | Path | Sequence[Any],
    sequence: int,
    *,
    pad: int = 0,
    trained: Sequence[Any] | None = None,
    together: bool = True,
) -> PackedDataset:
    """Documents packed into rows of ``sequence`` tokens, as a dataset for `loader`.

    Each document lies in one row, in the fullest that has room for it (best fit, longest first); longer ones are cut into
    pieces of ``sequence`` tokens and a rest. A batch is a dictionary of int64 (rows, sequence):

    - ``tokens``, with ``pad`` behind the last document;
    - ``targets``, one token ahead within the document; -100 at its end and in padding;
    - ``segments``: which positions belong together, 0, 1, … in a row and -1 for padding, for ``sl.nn.attention(segments=)``;
    - ``positions``, which begin at 0 in each document.

    Args:
        documents: a token file's path, or a list of sequences of tokens.
        trained: for each token of each document of a list, whether it is a target; other targets are -100. By default all
            are. `examples` makes them.
        together: whether documents share rows; with False each piece has a row of its own.

    Raises:
        BatchError: no documents, a sequence below 1, or ``trained`` of other lengths than the documents, or of a file.
        TokenFileError: no token file, or a damaged one.

    >>> row = sl.data.packed([[5, 6, 7], [8, 9]], sequence=6)[0]
    >>> {name: row[name].tolist() for name in ("tokens", "targets")}
    {'tokens': [5, 6, 7, 8, 9, 0], 'targets': [6, 7, -100, 9, -100, -100]}
    >>> {name: row[name].tolist() for name in ("segments", "positions")}
    {'segments': [0, 0, 0, 1, 1, -1], 'positions': [0, 1, 2, 0, 1, 0]}
    """
    if isinstance(documents, (str, Path)):
        if trained is not None:
            raise BatchError(
                f"packed: trained= is for a list of documents, and {documents} is a file: give its documents"
            )
        return PackedDataset(TokenFile(documents), sequence, pad, None, together)
    source = _Listed(documents)
    return PackedDataset(source, sequence, pad, None if trained is None else source.of_each(trained), together)


class _Listed:
    """Documents of a list, with the attributes of a token file."""

    def __init__(self, documents: Sequence[Any]) -> None:
        found = [tokens_in(document) for document in documents]
        if wrong := [f"document {number}: {fault}" for number, (_, fault) in enumerate(found) if fault]:
            raise BatchError(
                f"packed: documents are sequences of integers:\n{listing(wrong)}\nGive tokens, or a file's path."
            )
        self.tokens: NDArray[np.int64] = np.concatenate(
            [np.empty(0, np.int64), *(array.astype(np.int64) for array, _ in found)]
        )
        self.ends: NDArray[np.uint64] = np.cumsum([len(array) for array, _ in found], dtype=np.uint64)

    @property
    def header(self) -> dict[str, str]:
        return {"blake2b": checksum_of((self.tokens, self.ends))}

    def of_each(self, trained: Sequence[Any]) -> np.ndarray:
        """A boolean for each token, from those of each document."""
        flags = [np.asarray(each, bool).reshape(-1) for each in trained]
        lengths = np.diff(self.ends.astype(np.int64), prepend=0)
        if [len(each) for each in flags] != lengths.tolist():
            raise BatchError(
                f"packed: trained= has {len(flags)} documents of {sum(map(len, flags))} tokens, and there are {len(lengths)} "
                f"of {len(self.tokens)}: give a boolean for each token of each document"
            )
        return np.concatenate([np.empty(0, bool), *flags])


class PackedDataset(RowsDataset):
    """The dataset of `packed`.

    Attributes:
        filled: the share of positions that hold tokens.
    """

    def __init__(
        self, source: TokenFile | _Listed, sequence: int, pad: int, trained: np.ndarray | None, together: bool
    ) -> None:
        self._source, self._sequence, self._pad, self._trained = source, sequence, pad, trained
        self._together = together
        _require_length("packed", sequence)
        if not len(source.tokens):
            raise BatchError("packed: the documents have 0 tokens; give some")
        ends = source.ends.astype(np.int64)
        starts, lengths, last = _pieces(np.diff(ends, prepend=0), ends, sequence)
        row_of = pack(lengths, sequence) if together else np.arange(len(lengths))
        # Pieces in the order of their rows, and in each row in the order of the file.
        order = np.argsort(row_of, kind="stable")
        self._starts, self._lengths, self._last = starts[order], lengths[order], last[order]
        self._rows = np.searchsorted(row_of[order], np.arange(row_of.max() + 2))
        self.filled: float = len(source.tokens) / (len(self) * sequence)

    @property
    def identity(self) -> str:
        """What an index of this dataset is of."""
        how = "" if self._together else ", a piece in each"
        return f"rows of {self._sequence} of {self._source.header['blake2b']}{how}"

    def __len__(self) -> int:
        return len(self._rows) - 1

    def rows_at(self, indices: np.ndarray) -> dict[str, torch.Tensor]:
        shape = len(indices), self._sequence
        values = {"tokens": self._pad, "targets": IGNORED, "segments": -1, "positions": 0}
        batch = {name: np.full(shape, value, np.int64) for name, value in values.items()}
        for row, index in enumerate(indices):
            place = 0
            for segment, piece in enumerate(range(self._rows[index], self._rows[index + 1])):
                start, length = self._starts[piece], self._lengths[piece]
                # A piece that its document goes on behind has a target for its last token too.
                read = self._source.tokens[start : start + length + (not self._last[piece])]
                batch["tokens"][row, place : place + length] = read[:length]
                targets = read[1:]
                if self._trained is not None:
                    targets = np.where(self._trained[start + 1 : start + len(read)], targets, IGNORED)
                batch["targets"][row, place : place + len(read) - 1] = targets
                batch["segments"][row, place : place + length] = segment
                batch["positions"][row, place : place + length] = np.arange(length)
                place += length
        return {name: torch.from_numpy(values) for name, values in batch.items()}


def _require_length(function: str, sequence: Any) -> None:
    if not isinstance(sequence, Integral) or sequence < 1:
        raise BatchError(f"{function}: sequence={sequence!r}: give the number of tokens of a sample, at least 1")


def _pieces(lengths: np.ndarray, ends: np.ndarray, sequence: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The start and length of each piece of at most ``sequence`` tokens, and whether it is its document's last."""
    counts = -(-lengths // sequence)
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)  # of the piece in its document
    starts = np.repeat(ends - lengths, counts) + number * sequence
    left = np.repeat(ends, counts) - starts
    return starts, np.minimum(left, sequence), left <= sequence


def pack(lengths: np.ndarray, room: int) -> np.ndarray:
    """The row of each piece: longest first, each into the fullest row that has room for it, or into a new one."""
    row_of = np.empty(len(lengths), np.int64)
    with_room: list[list[int]] = [[] for _ in range(room + 1)]  # rows by the room that they have left
    some = 0  # bit r: there is a row with room for r more tokens
    rows = 0
    for piece in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[piece])
        fitting = some >> length
        if fitting:
            left = length + (fitting & -fitting).bit_length() - 1
            row = with_room[left].pop()
            if not with_room[left]:
                some &= ~(1 << left)
        else:
            left, row, rows = room, rows, rows + 1
        row_of[piece] = row
        if left > length:
            with_room[left - length].append(row)
            some |= 1 << (left - length)
    return row_of
