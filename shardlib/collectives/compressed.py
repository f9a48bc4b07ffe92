"""Sums over one axis in few bits, with error feedback (1-bit Adam, arXiv 2102.02888, section 4.3).

Two exchanges, each of one message for all the buffers it is given, however many leaves they hold:

1. every rank encodes its buffers and sends each rank the row that is that one's to add up (all-to-all); for a
   `CompressedSum` that is scattered, this is all;
2. every rank encodes its row of the sum and sends it to all (all-gather).

With n ranks, d elements (padded to a multiple of 8n) and k scales a rank sends 2(n−1)/n·d/8 + 8(n−1)k bytes for 1 bit and
fp32 scales. What either encoding leaves out is an error that the same rank adds the next time: n·row elements for the
first, a row for the second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardlib.collectives import primitives
from shardlib.collectives.codecs import Wire
from shardlib.mesh import Mesh


class Errors:
    """What earlier exchanges left out, by name; those of before stay as they are until `after` replaces them.

    Args:
        before: name -> flat tensor.
    """

    def __init__(self, before: dict[str, torch.Tensor]) -> None:
        self._before = before
        self.after = dict(before)

    def own(self, name: str) -> torch.Tensor:
        """An error that may be written to."""
        if self.after[name] is self._before.get(name):
            self.after[name] = self.after[name].clone()
        return self.after[name]


@dataclass(frozen=True)
class Item:
    """One buffer of an exchange.

    Attributes:
        wire: how it travels.
        buffer: padded as the wire asks; used up.
        errors: names of its errors, for the first and for the second encoding; empty without feedback.
    """

    wire: Wire
    buffer: torch.Tensor
    errors: tuple[str, ...]


class CompressedSum:
    """Buffers on their way to their sum (or mean) over ``axis``.

    Args:
        scatter: whether each rank wants its row alone.
        errors: of all items; written to.
    """

    def __init__(self, mesh: Mesh, axis: str, items: Sequence[Item], errors: Errors, *, scatter: bool) -> None:
        self._mesh, self._axis, self._items, self._errors, self._scatter = mesh, axis, items, errors, scatter
        message = _joined([self._encode(item) for item in items])
        self._arrived = torch.empty_like(message)
        self._work = primitives.all_to_all(mesh, axis, self._arrived, message)

    def _encode(self, item: Item) -> torch.Tensor:
        if not item.errors:
            return item.wire.encode(torch.zeros_like(item.buffer), item.buffer)
        name = item.errors[0]
        sent = item.wire.encode(self._errors.after[name], item.buffer)
        self._errors.after[name] = item.buffer
        return sent

    def wait(self, out: Sequence[torch.Tensor | None] | None = None) -> list[torch.Tensor]:
        """Each item's row; or whole buffer, in ``out`` where given."""
        self._work.wait()
        rows = self._arrived.split([item.wire.widths[0] for item in self._items], dim=1)
        if self._scatter:
            return [item.wire.add(row) for item, row in zip(self._items, rows, strict=True)]
        message = _joined([self._encode_row(item, row)[None] for item, row in zip(self._items, rows, strict=True)])
        arrived = message.new_empty((len(self._arrived), message.numel()))
        primitives.all_gather(self._mesh, self._axis, arrived, message).wait()
        parts = arrived.split([item.wire.widths[1] for item in self._items], dim=1)
        places = [None] * len(parts) if out is None else out
        return [i.wire.decode(part, place) for i, part, place in zip(self._items, parts, places, strict=True)]

    def _encode_row(self, item: Item, row: torch.Tensor) -> torch.Tensor:
        if item.errors:
            return item.wire.add_encode(row, self._errors.own(item.errors[1]))
        return item.wire.add_encode(row, item.buffer.new_zeros(item.wire.row))


def _joined(messages: list[torch.Tensor]) -> torch.Tensor:
    return messages[0].contiguous() if len(messages) == 1 else torch.cat(messages, dim=1)
