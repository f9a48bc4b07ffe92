"""Sums over one axis in few bits, with error feedback (1-bit Adam, arXiv 2102.02888, section 4.3).

Two exchanges, each of one message for all the buffers it is given, however many leaves they hold:

1. every rank encodes its buffers and sends each rank the row that is that one's to add up (all-to-all); where rows are
   scattered, this is all;
2. every rank encodes its row of the sum and sends it to all (all-gather).

With n ranks, d elements (padded to a multiple of 8n) and k scales a rank sends 2(n−1)/n·d/8 + 8(n−1)k bytes for 1 bit and
fp32 scales. What either encoding leaves out is an error that the same rank adds the next time: n·row elements for the
first, a row for the second.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol

import torch

from shardlib.collectives import primitives
from shardlib.collectives.codecs.base import Errors, Item, Line, Rows
from shardlib.mesh.mesh import Mesh


class Wire(Line, Protocol):
    """A line whose messages are bytes.

    Attributes:
        rows: the buffer's layout.
        row: elements of a padded row.
        widths: bytes of a message to one rank, and of a message to all.
    """

    rows: Rows
    row: int
    widths: tuple[int, int]

    def encode(self, error: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """``x + error`` as messages to the ranks, uint8 ``[ways, width]``; what they leave out is written over ``x``.

        Both are padded, ``[ways * row]``.
        """
        ...

    def add(self, messages: torch.Tensor) -> torch.Tensor:
        """This rank's row of the sum (or mean) of what came in, without padding, from uint8 ``[ways, width]``."""
        ...

    def add_encode(self, messages: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
        """That row plus ``error`` as a message to all, uint8 ``[second_width]``; updates ``error`` in place."""
        ...

    def decode(self, messages: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The whole buffer ``[elements]``, from everybody's rows, uint8 ``[ways, second_width]``; in ``out``, if given."""
        ...


class CompressedSum:
    """Buffers on their way to their sum (or mean) over ``axis``.

    Args:
        items: all scattered, or none.
        errors: of all items; written to.
    """

    def __init__(self, mesh: Mesh, axis: str, items: Sequence[Item[Wire]], errors: Errors) -> None:
        self._mesh, self._axis, self._items, self._errors = mesh, axis, items, errors
        message = _joined([self._encode(item) for item in items])
        self._arrived = torch.empty_like(message)
        self._work = primitives.all_to_all(mesh, axis, self._arrived, message)

    def _encode(self, item: Item[Wire]) -> torch.Tensor:
        if not item.kept:
            return item.line.encode(torch.zeros_like(item.buffer), item.buffer)
        name = item.kept[0]
        sent = item.line.encode(self._errors.after[name], item.buffer)
        self._errors.after[name] = item.buffer
        return sent

    def wait(self, out: Sequence[torch.Tensor | None] | None = None) -> list[torch.Tensor]:
        """Each item's row; or whole buffer, in ``out`` where given."""
        self._work.wait()
        rows = self._arrived.split([item.line.widths[0] for item in self._items], dim=1)
        if self._items[0].line.rows.scattered:
            return [item.line.add(row) for item, row in zip(self._items, rows, strict=True)]
        message = _joined([self._encode_row(item, row)[None] for item, row in zip(self._items, rows, strict=True)])
        arrived = message.new_empty((len(self._arrived), message.numel()))
        primitives.all_gather(self._mesh, self._axis, arrived, message).wait()
        parts = arrived.split([item.line.widths[1] for item in self._items], dim=1)
        places = [None] * len(parts) if out is None else out
        return [i.line.decode(part, place) for i, part, place in zip(self._items, parts, places, strict=True)]

    def _encode_row(self, item: Item[Wire], row: torch.Tensor) -> torch.Tensor:
        if item.kept:
            return item.line.add_encode(row, self._errors.own(item.kept[1]))
        return item.line.add_encode(row, item.buffer.new_zeros(item.line.row))


class TwoPhase:
    """A codec that binds `Wire`s, as far as it does not depend on what its messages hold."""

    whole: ClassVar[bool] = False

    def exchange(self, mesh: Mesh, axis: str, items: Sequence[Item[Wire]], errors: Errors) -> CompressedSum:
        return CompressedSum(mesh, axis, items, errors)


def _joined(messages: list[torch.Tensor]) -> torch.Tensor:
    return messages[0].contiguous() if len(messages) == 1 else torch.cat(messages, dim=1)
