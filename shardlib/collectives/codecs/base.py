"""The interface of compressed sums over one axis.

A `Codec` says how values are encoded. A `BoundCodec` is a codec bound to one buffer: it states which tensors are kept from
one exchange to the next, and how many bytes are sent. `SumsUnderWay` are those of several buffers, started and not yet
waited for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
import torch.nn.functional as F

from shardlib.collectives import primitives
from shardlib.mesh.mesh import Mesh


@dataclass(frozen=True)
class Rows:
    """The layout of a buffer that is summed over an axis.

    Attributes:
        ways: the number of ranks that exchange the buffer.
        index: this rank's index among them.
        elements: the buffer's length.
        filled: the start and stop of each leaf's elements. Elements between are padding, always zero.
        scattered: whether rank r gets only row r of the sum, where the rows are ``ways`` equal ranges of the buffer with
            equally many leaves in each. Otherwise all ranks get the whole sum, and rows only divide the work.
        mean: whether the result is the mean over the ranks; else the sum.
        dtype: of the buffer, of the kept tensors and of the result.
        shapes: the leaves' shapes, where the buffer holds whole leaves; else empty.
        groups: the number of groups of ranks that exchange the buffer, each in itself, and whose sums are summed afterwards.
        group: this group's index among them, in the order of the batch.
    """

    ways: int
    index: int
    elements: int
    filled: Sequence[tuple[int, int]]
    scattered: bool
    mean: bool
    dtype: torch.dtype
    shapes: tuple[tuple[int, ...], ...] = ()
    groups: int = 1
    group: int = 0

    def row(self, grain: int) -> int:
        """Elements of one row, padded to a multiple of ``grain``."""
        return -(-self.elements // (self.ways * grain)) * grain

    def pad(self, x: torch.Tensor, grain: int) -> torch.Tensor:
        """The buffer padded to ``[ways * row]``; ``x`` itself where it has that length."""
        row = self.row(grain)
        if self.ways * row == self.elements:
            return x
        if self.scattered:
            x = x.view(self.ways, -1)
            return F.pad(x, (0, row - x.shape[1])).view(-1)
        return F.pad(x, (0, self.ways * row - self.elements))

    def spans(self, grain: int) -> list[tuple[int, int]]:
        """The start and stop of each leaf's elements in the padded buffer."""
        if not self.scattered:
            return list(self.filled)
        leaves, shift = len(self.filled) // self.ways, self.row(grain) - self.elements // self.ways
        moved = [number // leaves * shift for number in range(len(self.filled))]
        return [(start + by, stop + by) for (start, stop), by in zip(self.filled, moved)]

    def unpadded(self, row: torch.Tensor) -> torch.Tensor:
        """One row of the result, without its padding."""
        return row[: self.elements // self.ways] if self.scattered else row


@dataclass(frozen=True)
class Kept:
    """A flat tensor that stays with a buffer from one exchange to the next, in ``TrainState.comm``. Subclasses are its kinds.

    Attributes:
        name: the kind's name in the names of ``TrainState.comm``.
        residual: whether the tensor is a residual, element by element of the buffer. If not, all ranks of the axis hold equal
            values.
        by_row: whether a rank holds the elements of its own row of the buffer. If not, a rank holds the whole buffer's.
        elements: the tensor's length on one rank.
        shapes: for `KeptFactors`: the index of each factor's leaf, and the factor's shape.
    """

    name: ClassVar[str]
    residual: ClassVar[bool] = True
    by_row: ClassVar[bool] = False

    elements: int
    shapes: tuple[tuple[int, tuple[int, int]], ...] = ()


class SentResidual(Kept):
    """The residual of the messages of a rank's buffer, laid out as the padded buffer."""

    name = "sent"


class RowResidual(Kept):
    """The residual of the second message, of a rank's row of the sum."""

    name = "row"
    by_row = True


class KeptFactors(Kept):
    """Low-rank factors of the sum, from which the next exchange starts."""

    name = "factors"
    residual = False


class Residuals:
    """The kept tensors of a step's exchanges, by name.

    An exchange never changes the tensors of ``before``, so that a step which is dropped can be taken back.

    Args:
        before: name -> flat tensor, before the exchanges.

    Attributes:
        after: name -> flat tensor, after the exchanges so far.
    """

    def __init__(self, before: dict[str, torch.Tensor]) -> None:
        self._before = before
        self.after = dict(before)

    def writable(self, name: str) -> torch.Tensor:
        """The tensor of ``after``, made a copy of the one of ``before`` at the first call, so that it may be written to."""
        if self.after[name] is self._before.get(name):
            self.after[name] = self.after[name].clone()
        return self.after[name]

    def empty(self, names: Iterable[str]) -> Residuals:
        """A copy with zeros in the place of the residuals of some names, for exchanges that are to send none of those."""
        return Residuals(self._before | {name: torch.zeros_like(self._before[name]) for name in names})

    def add(self, other: Residuals, names: Iterable[str]) -> None:
        """Add the residuals of these names that exchanges have left in ``other``, from `empty`."""
        self.after |= {name: self.after[name] + other.after[name] for name in names}


class BoundCodec(Protocol):
    """A codec bound to one buffer.

    Attributes:
        keeps: the tensors that stay from one exchange to the next.
        payload: bytes that one rank sends in an exchange.
    """

    @property
    def keeps(self) -> tuple[Kept, ...]: ...

    @property
    def payload(self) -> int: ...

    def pad(self, x: torch.Tensor) -> torch.Tensor:
        """A buffer padded for an exchange; ``x`` itself where it needs no padding."""
        ...

    def start(self, device: torch.device) -> list[torch.Tensor]:
        """The initial values of the tensors in ``keeps``."""
        ...


B = TypeVar("B", bound=BoundCodec, covariant=True)


@dataclass(frozen=True)
class Item(Generic[B]):
    """One buffer of an exchange.

    Attributes:
        codec: the codec bound to the buffer.
        buffer: padded by ``codec.pad``. The exchange may overwrite it and keep it.
        kept: names of the tensors in ``codec.keeps``.
    """

    codec: B
    buffer: torch.Tensor
    kept: tuple[str, ...]


class SumsUnderWay(Protocol):
    """The sums (or means) of some buffers, under way."""

    def wait(self, out: Sequence[torch.Tensor | None] | None = None) -> list[torch.Tensor]:
        """Each item's sum: this rank's row where rows are scattered; else the whole buffer, in ``out`` where given."""
        ...


class Codec(Protocol):
    """An encoding of summed values in fewer bytes. Frozen and comparable, since plans contain it.

    Attributes:
        wide: whether it can send float64.
        whole: whether buffers must hold whole leaves.
    """

    @property
    def wide(self) -> bool: ...

    @property
    def whole(self) -> bool: ...

    def bind(self, rows: Rows) -> BoundCodec: ...

    def exchange(self, mesh: Mesh, axis: str, items: Sequence[Item[Any]], residuals: Residuals) -> SumsUnderWay:
        """Start to sum buffers that are bound to this codec.

        ``residuals`` holds the kept tensors of all items. The exchange replaces them.
        """
        ...


# Sums over one axis in few bits, with error feedback (1-bit Adam, arXiv 2102.02888, section 4.3).
# There are two phases, each with one message for all buffers together:
# 1. every rank encodes its buffers and sends row r to rank r, which adds the rows up (all-to-all). Where rows are
# scattered, this    is all; 2. every rank encodes its row of the sum and sends it to all ranks (all-gather).
# With n ranks, d elements (padded to a multiple of 8n) and k scales a rank sends 2(n−1)/n·d/8 + 8(n−1)k bytes for 1 bit and
# fp32 scales. The residual of either encoding is added to what the same rank encodes next time: n·row elements for the
# first phase, a row for the second.


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
