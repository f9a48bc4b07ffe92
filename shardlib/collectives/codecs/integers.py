"""Sums and gathers in few bits: signs or integers, with scales in front of the values in a message.

Error feedback (arXiv 2102.02888): what a message leaves out is added to the next buffer. Errors are fp32 (float64 for
float64). A buffer and its error are interchangeable in x + e, so the new error is written over the *buffer*: the old
error stays as it was until the step is known to count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

from shardlib.collectives.codecs.base import Kept, RowResidual, Rows, SentResidual
from shardlib.collectives.codecs.two_phase import TwoPhase, Wire
from shardlib.errors import IllegalComposition
from shardlib.kernels import onebit, quantize
from shardlib.kernels.onebit import Segments
from shardlib.kernels.quantize import Blockwise


class Packing(Protocol):
    """How whole values travel in few bits, without errors: for gathers. Frozen and comparable."""

    @property
    def wide(self) -> bool: ...

    def size(self, elements: int) -> int:
        """Bytes of that many elements."""
        ...

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` ``[d]`` as uint8 ``[size(d)]``."""
        ...

    def unpack(self, message: torch.Tensor, out: torch.Tensor) -> None:
        """Fill ``out`` ``[d]`` with what was packed."""
        ...


@dataclass(frozen=True)
class OneBit(TwoPhase):
    """Signs and one scale per leaf, or per block of elements (see `shardlib.kernels.onebit`).

    Attributes:
        scales: "leaf", the papers' choice, or elements per block, a multiple of 8: better accuracy, more bytes.
    """

    scales: str | int = "leaf"
    feedback: bool = True
    wide: ClassVar[bool] = True

    def bind(self, rows: Rows) -> Wire:
        if self.scales == "leaf":
            return _LeafBits(rows, self.feedback)
        return _BlockBits(rows, self.feedback, int(self.scales))

    def __str__(self) -> str:
        per = "leaf" if self.scales == "leaf" else f"{self.scales} elements"
        return f"1 bit, a scale per {per}{'' if self.feedback else ', no error feedback'}"


def check_scales(scales: str | int, what: str) -> None:
    """Refuse what `OneBit` cannot use."""
    if scales != "leaf" and (not isinstance(scales, int) or isinstance(scales, bool) or scales < 8 or scales % 8):
        raise IllegalComposition(
            f"{what}(scales={scales!r}): use 'leaf', or the number of elements that share a scale, a multiple of 8"
        )


@dataclass(frozen=True)
class Integers(TwoPhase):
    """Integers of 8 or 4 bits with a scale per block (ZeRO++, arXiv 2306.10209; see `shardlib.kernels.quantize`)."""

    form: Blockwise
    feedback: bool = True
    wide: ClassVar[bool] = False

    def bind(self, rows: Rows) -> Wire:
        return _Blocks(rows, self.feedback, self.form)

    def size(self, elements: int) -> int:
        return 4 * self.form.scales(elements) + self.form.bytes(elements)

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        values, scales = quantize.quantize(x, self.form)
        return torch.cat([scales.view(torch.uint8), values.view(torch.uint8)])

    def unpack(self, message: torch.Tensor, out: torch.Tensor) -> None:
        scales, values = parts(message[None], self.form.scales(len(out)), torch.float32)
        quantize.dequantize(values[0].view(self.form.dtype), scales[0], self.form, len(out), out=out)

    def __str__(self) -> str:
        told = f"{self.form.bits} bits, a scale per {self.form.block} elements"
        return told + ("" if self.feedback else ", no error feedback")


class PaddedWire:
    """What wires have in common: rows padded to a grain."""

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
        """``out``, where a padded buffer can be decoded into it."""
        return out if out is not None and len(out) == self._length and out.dtype == self.rows.dtype else None

    def unpadded(self, whole: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        """What was decoded, without its padding; in ``out``, if given."""
        if out is None:
            return whole[: self.rows.elements]
        return out if whole is out else out.copy_(whole[: self.rows.elements])


class _LeafBits(PaddedWire):
    """Signs, and a scale for each leaf's part of a row (scattered) or of the buffer.

    Padding has segments of its own, before each leaf, whose scales are 0 and are not sent.
    """

    def __init__(self, rows: Rows, feedback: bool) -> None:
        super().__init__(rows, feedback, 8)
        edges = [edge for span in rows.spans(8) for edge in span]
        self._segments = Segments([0, *edges], self._length)
        self._leaves = len(rows.filled) // (rows.ways if rows.scattered else 1)
        self._mine, self._split = self._own_segments(), self._segments.split(rows.ways)
        width = self._leaves * rows.dtype.itemsize + self.row // 8
        self.widths = (width, width)

    def encode(self, error: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        bits, scales = onebit.compress(error, x, self._segments)
        sent = scales[1::2]
        heads = sent.view(self.rows.ways, -1) if self.rows.scattered else sent.expand(self.rows.ways, -1)
        return message(heads, bits.view(self.rows.ways, -1))

    def add(self, messages: torch.Tensor) -> torch.Tensor:
        scales, bits = self._read(messages)
        return self.rows.unpadded(onebit.average(bits, self._weighed(scales), self._mine))

    def add_encode(self, messages: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
        scales, bits = self._read(messages)
        bits, scales = onebit.average_compress(bits, self._weighed(scales), error, self._mine)
        return message(scales[None, 1::2], bits[None])[0]

    def decode(self, messages: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        scales, bits = self._read(messages)
        sent = bits.reshape(-1), scales.reshape(-1), self._split
        return self.unpadded(onebit.decompress(*sent, out=self._whole(out)), out)

    def _read(self, messages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scales, the padding's zeros between them, and bits."""
        sent, bits = parts(messages, self._leaves, self.rows.dtype)
        scales = sent.new_zeros((len(sent), 2 * self._leaves))
        scales[:, 1::2] = sent
        return scales, bits

    def _weighed(self, scales: torch.Tensor) -> torch.Tensor:
        """The kernels average: the sum of n is n times that."""
        return scales if self.rows.mean else scales * self.rows.ways

    def _own_segments(self) -> Segments:
        first = self.rows.place * self.row
        part = self._segments.part(first, first + self.row)
        if not self.rows.scattered:
            return part
        first = self.rows.place * 2 * self._leaves  # the other rows' segments are empty here
        return Segments(part.offsets[first : first + 2 * self._leaves + 1], self.row)


class _BlockBits(PaddedWire):
    """Signs, and a scale for each block of elements, whichever leaves they belong to."""

    def __init__(self, rows: Rows, feedback: bool, block: int) -> None:
        super().__init__(rows, feedback, block)
        self._block = block
        self._blocks = Segments.blocks(block, self._length)
        self._one = Segments.blocks(block, self.row)
        self._gaps = _gaps(rows.spans(block), self._length)
        first, stop = rows.place * self.row, (rows.place + 1) * self.row
        cut = [(max(start, first) - first, min(end, stop) - first) for start, end in self._gaps]
        self._own_gaps = [(start, end) for start, end in cut if start < end]
        width = self._one.count * rows.dtype.itemsize + self.row // 8
        self.widths = (width, width)

    def encode(self, error: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        bits, scales = onebit.compress(error, x, self._blocks)
        _clear(x, self._gaps)
        return message(scales.view(self.rows.ways, -1), bits.view(self.rows.ways, -1))

    def add(self, messages: torch.Tensor) -> torch.Tensor:
        scales, bits = self._read(messages)
        row = onebit.average(bits, scales, self._one)
        return self.rows.unpadded(_clear(row, self._own_gaps))

    def add_encode(self, messages: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
        scales, bits = self._read(messages)
        bits, scales = onebit.average_compress(bits, scales, error, self._one)
        _clear(error, self._own_gaps)
        return message(scales[None], bits[None])[0]

    def decode(self, messages: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        scales, bits = parts(messages, self._one.count, self.rows.dtype)
        whole = onebit.decompress(bits.reshape(-1), scales.reshape(-1), self._blocks, out=self._whole(out))
        return self.unpadded(_clear(whole, self._gaps), out)

    def _read(self, messages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scales, bits = parts(messages, self._one.count, self.rows.dtype)
        return scales if self.rows.mean else scales * self.rows.ways, bits


class _Blocks(PaddedWire):
    """Integers, and a scale for each block of elements. Padding is 0 and stays so."""

    def __init__(self, rows: Rows, feedback: bool, form: Blockwise) -> None:
        super().__init__(rows, feedback, form.block)
        self._form = form
        self._scales = form.scales(self.row)
        width = 4 * self._scales + form.bytes(self.row)
        self.widths = (width, width)

    def encode(self, error: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        values, scales = quantize.quantize(error, self._form, x)
        return message(scales.view(self.rows.ways, -1), values.view(torch.uint8).view(self.rows.ways, -1))

    def add(self, messages: torch.Tensor) -> torch.Tensor:
        return self.rows.unpadded(quantize.dequantize_sum(*self._read(messages), self._form, self.row))

    def add_encode(self, messages: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
        sent = self._read(messages)
        values, scales = quantize.dequantize_sum_quantize(*sent, self._form, self.row, self._form, error)
        return message(scales[None], values.view(torch.uint8)[None])[0]

    def decode(self, messages: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        scales, values = parts(messages, self._scales, torch.float32)
        sent = values.reshape(-1).view(self._form.dtype), scales.reshape(-1), self._form, self._length
        return self.unpadded(quantize.dequantize(*sent, out=self._whole(out)), out)

    def _read(self, messages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scales, values = parts(messages, self._scales, torch.float32)
        return values.contiguous().view(self._form.dtype), scales / self.rows.ways if self.rows.mean else scales


def message(scales: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Scales ``[rows, k]`` and bytes ``[rows, b]`` as uint8 ``[rows, 4k + b]``."""
    return torch.cat([_whole(scales).view(torch.uint8), values], dim=1)


def _whole(x: torch.Tensor) -> torch.Tensor:
    """A copy whose strides are those of its shape (a dimension of size 1 may else keep another), as a view asks for."""
    return x.clone(memory_format=torch.contiguous_format)


def parts(messages: torch.Tensor, count: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """``count`` scales of ``dtype`` and the bytes behind them, from every row: what `message` joined."""
    width = count * dtype.itemsize
    # In one row: of rows without elements none can be seen as another dtype.
    scales = _whole(messages[:, :width]).view(-1).view(dtype)
    return scales.view(len(messages), count), messages[:, width:]


def _gaps(filled: list[tuple[int, int]], length: int) -> list[tuple[int, int]]:
    """From where to where there is only padding."""
    starts = [0, *(stop for _, stop in filled)]
    stops = [*(start for start, _ in filled), length]
    return [(start, stop) for start, stop in zip(starts, stops) if start < stop]


def _clear(buffer: torch.Tensor, gaps: list[tuple[int, int]]) -> torch.Tensor:
    for start, stop in gaps:
        buffer[start:stop].zero_()
    return buffer
