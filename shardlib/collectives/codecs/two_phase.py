"""Sums over one axis in few bits, with error feedback (1-bit Adam, arXiv 2102.02888, section 4.3).

There are two phases, each with one message for all buffers together:

1. every rank encodes its buffers and sends row r to rank r, which adds the rows up (all-to-all). Where rows are scattered,
   this is all;
2. every rank encodes its row of the sum and sends it to all ranks (all-gather).

With n ranks, d elements (padded to a multiple of 8n) and k scales a rank sends 2(n−1)/n·d/8 + 8(n−1)k bytes for 1 bit and
fp32 scales. The residual of either encoding is added to what the same rank encodes next time: n·row elements for the first
phase, a row for the second. A buffer x and its residual e are interchangeable in x + e, so the new residual is written over
the *buffer*. The old residual stays unchanged, in case the step is dropped. Residuals are fp32 (float64 for float64).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F

from shardlib.collectives import primitives
from shardlib.collectives.codecs.base import Item, Kept, Residuals, RowResidual, Rows, SentResidual
from shardlib.mesh.mesh import Mesh

Coded = tuple[torch.Tensor, torch.Tensor]  # scales and bytes


class BoundTwoPhase(ABC):
    """The base of bound codecs of two phases, whose messages have scales first, and then bytes.

    Args:
        rows: the buffer's layout.
        feedback: whether residuals are kept.
        grain: of what rows are padded to a multiple.
        scales: how many scales a message has, and their dtype.
        values: how many bytes.

    Attributes:
        row: elements of a padded row.
        widths: bytes of a message to one rank (first phase), and of a message to all ranks (second phase).
    """

    rows: Rows
    row: int

    averages: ClassVar[bool] = False  # whether `_sum` and `_sum_encode` return means of what they are given

    def __init__(self, rows: Rows, feedback: bool, grain: int, scales: tuple[int, torch.dtype], values: int) -> None:
        self.rows, self.row, self._feedback, self._grain, self._scales = rows, rows.row(grain), feedback, grain, scales
        width = scales[0] * scales[1].itemsize + values
        self.widths: tuple[int, int] = (width, width)

    @abstractmethod
    def _encode(self, residual: torch.Tensor, x: torch.Tensor) -> Coded:
        """``x + residual``, padded, as scales and bytes, ``[ways, …]`` both; writes the new residual over ``x``."""

    @abstractmethod
    def _sum(self, scales: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """This rank's row of the sum, padded, from the ranks' scales and bytes."""

    @abstractmethod
    def _sum_encode(self, scales: torch.Tensor, values: torch.Tensor, residual: torch.Tensor) -> Coded:
        """`_sum` plus ``residual``, which is updated in place, as scales and bytes, both flat."""

    @abstractmethod
    def _decode(self, scales: torch.Tensor, values: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        """The whole padded buffer from all ranks' rows, in ``out`` if given."""

    @property
    def keeps(self) -> tuple[Kept, ...]:
        if not self._feedback:
            return ()
        sent = SentResidual(self._length)
        return (sent,) if self.rows.scattered else (sent, RowResidual(self.row))

    @property
    def payload(self) -> int:
        first, second = self.widths
        return (self.rows.ways - 1) * (first if self.rows.scattered else first + second)

    def start(self, device: torch.device) -> list[torch.Tensor]:
        return [torch.zeros(kept.elements, dtype=self.rows.dtype, device=device) for kept in self.keeps]

    def pad(self, x: torch.Tensor) -> torch.Tensor:
        return self.rows.pad(x, self._grain)

    @property
    def _length(self) -> int:
        return self.rows.ways * self.row

    def encode(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """One message per rank, uint8 ``[ways, widths[0]]``; writes the new residual over ``x``."""
        return joined(*self._encode(residual, x))

    def add(self, messages: torch.Tensor) -> torch.Tensor:
        """This rank's row of the sum (or mean), without padding, from the ranks' messages, uint8 ``[ways, widths[0]]``."""
        return self.rows.unpadded(self._sum(*self._read(messages)))

    def add_encode(self, messages: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """This rank's row of the sum (or mean) plus ``residual`` as a message to all ranks, uint8 ``[widths[1]]``."""
        scales, values = self._sum_encode(*self._read(messages), residual)
        return joined(scales[None], values[None])[0]

    def decode(self, messages: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The whole buffer ``[elements]`` from all ranks' rows, uint8 ``[ways, widths[1]]``; in ``out``, if given."""
        fits = out is not None and len(out) == self._length and out.dtype == self.rows.dtype
        whole = self._decode(*split(messages, *self._scales), out if fits else None)
        if out is None:
            return whole[: self.rows.elements]
        return out if whole is out else out.copy_(whole[: self.rows.elements])

    def _read(self, messages: torch.Tensor) -> Coded:
        """The messages' scales, which make `_sum` return the sum or the mean, whichever is due, and their bytes."""
        scales, values = split(messages, *self._scales)
        if self.averages and not self.rows.mean:
            scales = scales * self.rows.ways
        elif self.rows.mean and not self.averages:
            scales = scales / self.rows.ways
        return scales, values


class CompressedSum:
    """The sums (or means) of some buffers over ``axis``, under way.

    Args:
        items: the buffers. Rows are scattered in all of them, or in none.
        residuals: the kept tensors of all items, which the exchange replaces.
    """

    def __init__(self, mesh: Mesh, axis: str, items: Sequence[Item[BoundTwoPhase]], residuals: Residuals) -> None:
        self._mesh, self._axis, self._items, self._residuals = mesh, axis, items, residuals
        message = _joined([self._encode(item) for item in items])
        self._arrived = torch.empty_like(message)
        self._work = primitives.all_to_all(mesh, axis, self._arrived, message)

    def _encode(self, item: Item[BoundTwoPhase]) -> torch.Tensor:
        if not item.kept:
            return item.codec.encode(torch.zeros_like(item.buffer), item.buffer)
        name = item.kept[0]
        sent = item.codec.encode(self._residuals.after[name], item.buffer)
        self._residuals.after[name] = item.buffer
        return sent

    def wait(self, out: Sequence[torch.Tensor | None] | None = None) -> list[torch.Tensor]:
        """Each item's sum: see `SumsUnderWay.wait`."""
        self._work.wait()
        rows = self._arrived.split([item.codec.widths[0] for item in self._items], dim=1)
        if self._items[0].codec.rows.scattered:
            return [item.codec.add(row) for item, row in zip(self._items, rows, strict=True)]
        message = _joined([self._encode_row(item, row)[None] for item, row in zip(self._items, rows, strict=True)])
        arrived = message.new_empty((len(self._arrived), message.numel()))
        primitives.all_gather(self._mesh, self._axis, arrived, message).wait()
        messages = arrived.split([item.codec.widths[1] for item in self._items], dim=1)
        outs = [None] * len(messages) if out is None else out
        return [item.codec.decode(row, into) for item, row, into in zip(self._items, messages, outs, strict=True)]

    def _encode_row(self, item: Item[BoundTwoPhase], row: torch.Tensor) -> torch.Tensor:
        if item.kept:
            return item.codec.add_encode(row, self._residuals.writable(item.kept[1]))
        return item.codec.add_encode(row, item.buffer.new_zeros(item.codec.row))


class TwoPhase:
    """The base of codecs that bind to `BoundTwoPhase`s: what does not depend on the encoding."""

    whole: ClassVar[bool] = False

    def exchange(
        self, mesh: Mesh, axis: str, items: Sequence[Item[BoundTwoPhase]], residuals: Residuals
    ) -> CompressedSum:
        return CompressedSum(mesh, axis, items, residuals)


def _joined(messages: list[torch.Tensor]) -> torch.Tensor:
    return messages[0].contiguous() if len(messages) == 1 else torch.cat(messages, dim=1)


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """``[..., d]`` as ``[rows, d]``."""
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


def padded(rows: torch.Tensor, by: int) -> torch.Tensor:
    """``rows`` with ``by`` zeros at the end of each; themselves for none, of which `F.pad` would make a copy."""
    return F.pad(rows, (0, by)) if by else rows


def joined(scales: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Scales ``[rows, k]`` and bytes ``[rows, b]`` as uint8 ``[rows, 4k + b]``."""
    return torch.cat([_whole(scales).view(torch.uint8), values], dim=1)


def _whole(x: torch.Tensor) -> torch.Tensor:
    """A contiguous copy. A dimension of size 1 too has the stride of its shape, which a view as another dtype requires."""
    return x.clone(memory_format=torch.contiguous_format)


def split(messages: torch.Tensor, count: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """``count`` scales of ``dtype`` and the bytes behind them, from every row: the inverse of `joined`."""
    width = count * dtype.itemsize
    # Flat, since torch refuses to view rows without elements as another dtype.
    scales = _whole(messages[:, :width]).view(-1).view(dtype)
    return scales.view(len(messages), count), messages[:, width:]
