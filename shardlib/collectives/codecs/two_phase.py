"""Sums over one axis in few bits, with error feedback (1-bit Adam, arXiv 2102.02888, section 4.3).

There are two phases, each with one message for all buffers together:

1. every rank encodes its buffers and sends row r to rank r, which adds the rows up (all-to-all). Where rows are scattered,
this
   is all;
2. every rank encodes its row of the sum and sends it to all ranks (all-gather).

With n ranks, d elements (padded to a multiple of 8n) and k scales a rank sends 2(n−1)/n·d/8 + 8(n−1)k bytes for 1 bit and
fp32 scales. The residual of either encoding is added to what the same rank encodes next time: n·row elements for the first
phase, a row for the second.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol

import torch

from shardlib.collectives import primitives
from shardlib.collectives.codecs.base import BoundCodec, Item, Residuals, Rows
from shardlib.mesh.mesh import Mesh


class BoundTwoPhase(BoundCodec, Protocol):
    """A bound codec of two phases, whose messages are bytes.

    Attributes:
        rows: the buffer's layout.
        row: elements of a padded row.
        widths: bytes of a message to one rank (first phase), and of a message to all ranks (second phase).
    """

    rows: Rows
    row: int
    widths: tuple[int, int]

    def encode(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Encode ``x + residual`` as one message per rank, uint8 ``[ways, widths[0]]``, and write the new residual over
        ``x``.

        ``x`` and ``residual`` are padded, ``[ways * row]``.
        """
        ...

    def add(self, messages: torch.Tensor) -> torch.Tensor:
        """This rank's row of the sum (or mean), without padding, from the ranks' messages, uint8 ``[ways, widths[0]]``."""
        ...

    def add_encode(self, messages: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Encode this rank's row of the sum (or mean) plus ``residual`` as a message to all ranks, uint8 ``[widths[1]]``.

        ``messages`` are as in `add`. ``residual`` is updated in place.
        """
        ...

    def decode(self, messages: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The whole buffer ``[elements]`` from all ranks' rows, uint8 ``[ways, widths[1]]``; in ``out``, if given."""
        ...


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
        """Each item's sum: see `Exchange.wait`."""
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
