"""The interfaces of compressed sums over one axis, and of packings.

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

from shardlib.kernels.common.operators import opaque
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

    after: dict[str, Any]

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


class Packing(Protocol):
    """An encoding of gathered or exchanged values in few bits, without error feedback. Frozen and comparable."""

    @property
    def wide(self) -> bool: ...

    def size(self, elements: int) -> int:
        """The length in bytes of ``elements`` packed elements."""
        ...

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` ``[..., d]`` as uint8 ``[..., size(d)]``: each row is a message of its own, which no other row changes.

        A message of zero bytes stands for zeros.
        """
        ...

    def unpack(self, message: torch.Tensor, out: torch.Tensor) -> None:
        """Decode ``message``, which `pack` returned, into ``out`` ``[..., d]``, which is contiguous."""
        ...


_packings: list[Packing] = []  # those that operators name by their place


def _number_of(packing: Packing) -> int:
    if packing not in _packings:
        _packings.append(packing)
    return _packings.index(packing)


def packed(x: torch.Tensor, packing: Packing) -> torch.Tensor:
    """``packing.pack(x)``, which a graph has as an operator."""
    return _pack(x, _number_of(packing))


def unpacked(message: torch.Tensor, packing: Packing, width: int, dtype: torch.dtype) -> torch.Tensor:
    """What ``packing.unpack`` writes to rows of ``width`` elements, which a graph has as an operator."""
    return _unpack(message, _number_of(packing), width, dtype)


def _packed(x: torch.Tensor, packing: int) -> torch.Tensor:
    return _packings[packing].pack(x)


def _unpacked(message: torch.Tensor, packing: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    out = message.new_empty((*message.shape[:-1], width), dtype=dtype)
    _packings[packing].unpack(message, out)
    return out


_pack = opaque(
    "pack_rows",
    _packed,
    lambda x, packing: x.new_empty((*x.shape[:-1], _packings[packing].size(x.shape[-1])), dtype=torch.uint8),
)
_unpack = opaque(
    "unpack_rows",
    _unpacked,
    lambda message, packing, width, dtype: message.new_empty((*message.shape[:-1], width), dtype=dtype),
)
