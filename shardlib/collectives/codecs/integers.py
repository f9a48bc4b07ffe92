"""Codecs for sums and gathers of signs or integers. A message has the scales first, then the values.

Error feedback (arXiv 2102.02888): a message's residual is added to the next buffer. Residuals are fp32 (float64 for float64).
A buffer x and its residual e are interchangeable in x + e, so the new residual is written over the *buffer*. The old residual
stays unchanged, in case the step is dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F

from shardlib.collectives.codecs.base import BoundTwoPhase, Kept, RowResidual, Rows, SentResidual, TwoPhase
from shardlib.errors import IllegalComposition
from shardlib.kernels import onebit, quantize
from shardlib.kernels.common.operators import opaque
from shardlib.kernels.onebit import Segments
from shardlib.kernels.quantize import Blockwise


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


@dataclass(frozen=True)
class OneBit(TwoPhase):
    """A codec of signs with one scale per leaf, or per block of elements (see `shardlib.kernels.onebit`).

    Attributes:
        scales: "leaf" as in the papers; or the number of elements per scale, a multiple of 8: better accuracy, more bytes.
        feedback: whether residuals are kept.
    """

    scales: str | int = "leaf"
    feedback: bool = True
    wide: ClassVar[bool] = True

    def bind(self, rows: Rows) -> BoundTwoPhase:
        if self.scales == "leaf":
            return _LeafBits(rows, self.feedback)
        return _BlockBits(rows, self.feedback, int(self.scales))

    def __str__(self) -> str:
        per = "leaf" if self.scales == "leaf" else f"{self.scales} elements"
        return f"1 bit, a scale per {per}{'' if self.feedback else ', no error feedback'}"


def scales_of(what: str, scales: Any) -> str | int:
    """An argument for the scales of `OneBit`.

    Raises:
        IllegalComposition: names ``what``, for other ones.
    """
    if isinstance(scales, str) and scales == "leaf":
        return "leaf"
    if isinstance(scales, bool) or not isinstance(scales, Integral) or scales < 8 or scales % 8:
        raise IllegalComposition(
            f"{what}(scales={scales!r}): use 'leaf', or the number of elements that share a scale, a multiple of 8"
        )
    return int(scales)


@dataclass(frozen=True)
class Integers(TwoPhase):
    """A codec and packing of 8- or 4-bit integers with one scale per block (ZeRO++, arXiv 2306.10209).

    See `shardlib.kernels.quantize`.

    Attributes:
        form: the bits, and the elements per scale.
        feedback: whether residuals are kept.
    """

    form: Blockwise
    feedback: bool = True
    wide: ClassVar[bool] = False

    def bind(self, rows: Rows) -> BoundTwoPhase:
        return _Blocks(rows, self.feedback, self.form)

    def size(self, elements: int) -> int:
        return 4 * self.form.scales(elements) + self.form.bytes(elements)

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        rows = rows_of(x)
        whole = padded(rows, self._padding(rows))
        count, width = whole.shape
        values, scales = quantize.quantize(whole.view(-1), self.form)
        sent = values.view(torch.uint8).view(count, self.form.bytes(width))[:, : self.form.bytes(rows.shape[1])]
        return joined(scales.view(count, self.form.scales(width)), sent).view(*x.shape[:-1], self.size(x.shape[-1]))

    def unpack(self, message: torch.Tensor, out: torch.Tensor) -> None:
        rows = rows_of(out)
        count, width = len(rows), rows.shape[1] + self._padding(rows)
        scales, values = split(rows_of(message), self.form.scales(width), torch.float32)
        values = padded(values, self.form.bytes(width) - values.shape[1]).contiguous().view(self.form.dtype)
        whole = rows if width == rows.shape[1] else rows.new_empty(count, width)
        quantize.dequantize(values.view(-1), scales.view(-1), self.form, count * width, out=whole.view(-1))
        if whole is not rows:
            rows.copy_(whole[:, : rows.shape[1]])

    def _padding(self, rows: torch.Tensor) -> int:
        """Elements that fill each row's last block, where another row follows."""
        return -rows.shape[1] % self.form.block if len(rows) > 1 else 0

    def __str__(self) -> str:
        text = f"{self.form.bits} bits, a scale per {self.form.block} elements"
        return text + ("" if self.feedback else ", no error feedback")


class BoundPadded:
    """The base of `BoundTwoPhase`s whose rows are padded to a multiple of ``grain`` elements."""

    widths: tuple[int, int]

    def __init__(self, rows: Rows, feedback: bool, grain: int) -> None:
        self.rows, self.row, self._feedback, self._grain = rows, rows.row(grain), feedback, grain

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

    def _whole(self, out: torch.Tensor | None) -> torch.Tensor | None:
        """``out`` if a padded buffer can be decoded into it, else None."""
        return out if out is not None and len(out) == self._length and out.dtype == self.rows.dtype else None

    def unpadded(self, whole: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        """The decoded buffer ``whole`` without its padding; in ``out``, if given."""
        if out is None:
            return whole[: self.rows.elements]
        return out if whole is out else out.copy_(whole[: self.rows.elements])


class _LeafBits(BoundPadded):
    """Signs with one scale per leaf: of the leaf's elements in a row where rows are scattered, else in the whole buffer.

    The padding before each leaf is a segment too, whose scale is 0 and is not sent.
    """

    def __init__(self, rows: Rows, feedback: bool) -> None:
        super().__init__(rows, feedback, 8)
        self._leaves = len(rows.filled) // (rows.ways if rows.scattered else 1)
        width = self._leaves * rows.dtype.itemsize + self.row // 8
        self.widths = (width, width)

    def encode(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        bits, scales = onebit.compress(residual, x, self._segments)
        sent = scales[1::2]
        heads = sent.view(self.rows.ways, -1) if self.rows.scattered else sent.expand(self.rows.ways, -1)
        return joined(heads, bits.view(self.rows.ways, -1))

    def add(self, messages: torch.Tensor) -> torch.Tensor:
        scales, bits = self._read(messages)
        return self.rows.unpadded(onebit.average(bits, self._weighed(scales), self._row_segments))

    def add_encode(self, messages: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        scales, bits = self._read(messages)
        bits, scales = onebit.average_compress(bits, self._weighed(scales), residual, self._row_segments)
        return joined(scales[None, 1::2], bits[None])[0]

    def decode(self, messages: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        scales, bits = self._read(messages)
        sent = bits.reshape(-1), scales.reshape(-1), self._split
        return self.unpadded(onebit.decompress(*sent, out=self._whole(out)), out)

    def _read(self, messages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The messages' scales, with zeros for the padding between them, and bits."""
        sent, bits = split(messages, self._leaves, self.rows.dtype)
        scales = sent.new_zeros((len(sent), 2 * self._leaves))
        scales[:, 1::2] = sent
        return scales, bits

    def _weighed(self, scales: torch.Tensor) -> torch.Tensor:
        """Scales that make the kernels, which average, return the sum where a sum is due."""
        return scales if self.rows.mean else scales * self.rows.ways

    # As many as there are ranks: found when values are exchanged, not for a plan.
    @cached_property
    def _segments(self) -> Segments:
        return Segments([0, *(edge for span in self.rows.spans(8) for edge in span)], self._length)

    @cached_property
    def _split(self) -> Segments:
        return self._segments.split(self.rows.ways)

    @cached_property
    def _row_segments(self) -> Segments:
        """The segments in this rank's row."""
        first = self.rows.index * self.row
        segments = self._segments.between(first, first + self.row)
        if not self.rows.scattered:
            return segments
        first = self.rows.index * 2 * self._leaves  # the other rows' segments are empty here
        return Segments(segments.offsets[first : first + 2 * self._leaves + 1], self.row)


class _BlockBits(BoundPadded):
    """Signs with one scale per block of elements, across leaves."""

    def __init__(self, rows: Rows, feedback: bool, block: int) -> None:
        super().__init__(rows, feedback, block)
        self._block = block
        self._blocks = Segments.blocks(block, self._length)
        self._row_blocks = Segments.blocks(block, self.row)
        width = self._row_blocks.count * rows.dtype.itemsize + self.row // 8
        self.widths = (width, width)

    def encode(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        bits, scales = onebit.compress(residual, x, self._blocks)
        _clear(x, self._gaps)
        return joined(scales.view(self.rows.ways, -1), bits.view(self.rows.ways, -1))

    def add(self, messages: torch.Tensor) -> torch.Tensor:
        scales, bits = self._read(messages)
        row = onebit.average(bits, scales, self._row_blocks)
        return self.rows.unpadded(_clear(row, self._row_gaps))

    def add_encode(self, messages: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        scales, bits = self._read(messages)
        bits, scales = onebit.average_compress(bits, scales, residual, self._row_blocks)
        _clear(residual, self._row_gaps)
        return joined(scales[None], bits[None])[0]

    def decode(self, messages: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        scales, bits = split(messages, self._row_blocks.count, self.rows.dtype)
        whole = onebit.decompress(bits.reshape(-1), scales.reshape(-1), self._blocks, out=self._whole(out))
        return self.unpadded(_clear(whole, self._gaps), out)

    @cached_property
    def _gaps(self) -> list[tuple[int, int]]:
        return _gaps(self.rows.spans(self._block), self._length)

    @cached_property
    def _row_gaps(self) -> list[tuple[int, int]]:
        """The gaps in this rank's row."""
        first, stop = self.rows.index * self.row, (self.rows.index + 1) * self.row
        clipped = [(max(start, first) - first, min(end, stop) - first) for start, end in self._gaps]
        return [(start, end) for start, end in clipped if start < end]

    def _read(self, messages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scales, bits = split(messages, self._row_blocks.count, self.rows.dtype)
        return scales if self.rows.mean else scales * self.rows.ways, bits


class _Blocks(BoundPadded):
    """Integers with one scale per block of elements. Padding is 0 and stays 0."""

    def __init__(self, rows: Rows, feedback: bool, form: Blockwise) -> None:
        super().__init__(rows, feedback, form.block)
        self._form = form
        self._scales = form.scales(self.row)
        width = 4 * self._scales + form.bytes(self.row)
        self.widths = (width, width)

    def encode(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        values, scales = quantize.quantize(residual, self._form, x)
        return joined(scales.view(self.rows.ways, -1), values.view(torch.uint8).view(self.rows.ways, -1))

    def add(self, messages: torch.Tensor) -> torch.Tensor:
        return self.rows.unpadded(quantize.dequantize_sum(*self._read(messages), self._form, self.row))

    def add_encode(self, messages: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        sent = self._read(messages)
        values, scales = quantize.dequantize_sum_quantize(*sent, self._form, self.row, self._form, residual)
        return joined(scales[None], values.view(torch.uint8)[None])[0]

    def decode(self, messages: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        scales, values = split(messages, self._scales, torch.float32)
        sent = values.reshape(-1).view(self._form.dtype), scales.reshape(-1), self._form, self._length
        return self.unpadded(quantize.dequantize(*sent, out=self._whole(out)), out)

    def _read(self, messages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scales, values = split(messages, self._scales, torch.float32)
        return values.contiguous().view(self._form.dtype), scales / self.rows.ways if self.rows.mean else scales


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


def _gaps(filled: list[tuple[int, int]], length: int) -> list[tuple[int, int]]:
    """The start and stop of each run of padding in a buffer of ``length`` elements."""
    starts = [0, *(stop for _, stop in filled)]
    stops = [*(start for start, _ in filled), length]
    return [(start, stop) for start, stop in zip(starts, stops) if start < stop]


def _clear(buffer: torch.Tensor, gaps: list[tuple[int, int]]) -> torch.Tensor:
    """``buffer`` with zeros written to the gaps."""
    for start, stop in gaps:
        buffer[start:stop].zero_()
    return buffer
