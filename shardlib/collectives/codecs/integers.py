"""Codecs for sums and gathers of signs or integers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from typing import Any, ClassVar

import torch

from shardlib.collectives.codecs.base import Rows
from shardlib.collectives.codecs.two_phase import BoundTwoPhase, Coded, TwoPhase, joined, padded, rows_of, split
from shardlib.errors import IllegalComposition
from shardlib.kernels import onebit, quantize
from shardlib.kernels.onebit import Segments
from shardlib.kernels.quantize import Blockwise


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
            f"{what}(scales={scales!r}): use 'leaf', or a number of elements per scale, a multiple of 8"
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


class _LeafBits(BoundTwoPhase):
    """Signs with one scale per leaf: of the leaf's elements in a row where rows are scattered, else in the whole buffer.

    The padding before each leaf is a segment too, whose scale is 0 and is not sent.
    """

    averages = True

    def __init__(self, rows: Rows, feedback: bool) -> None:
        self._leaves = len(rows.filled) // (rows.ways if rows.scattered else 1)
        super().__init__(rows, feedback, 8, (self._leaves, rows.dtype), rows.row(8) // 8)

    def _encode(self, residual: torch.Tensor, x: torch.Tensor) -> Coded:
        bits, scales = onebit.compress(residual, x, self._segments)
        sent, ways = scales[1::2], self.rows.ways
        return sent.view(ways, -1) if self.rows.scattered else sent.expand(ways, -1), bits.view(ways, -1)

    def _sum(self, scales: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return onebit.average(values, self._of_segments(scales), self._row_segments)

    def _sum_encode(self, scales: torch.Tensor, values: torch.Tensor, residual: torch.Tensor) -> Coded:
        bits, made = onebit.average_compress(values, self._of_segments(scales), residual, self._row_segments)
        return made[1::2], bits

    def _decode(self, scales: torch.Tensor, values: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        return onebit.decompress(values.reshape(-1), self._of_segments(scales).view(-1), self._split, out=out)

    def _of_segments(self, sent: torch.Tensor) -> torch.Tensor:
        """Scales with zeros for the padding between them."""
        scales = sent.new_zeros((len(sent), 2 * self._leaves))
        scales[:, 1::2] = sent
        return scales

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


class _BlockBits(BoundTwoPhase):
    """Signs with one scale per block of elements, across leaves."""

    averages = True

    def __init__(self, rows: Rows, feedback: bool, block: int) -> None:
        self._block, row = block, rows.row(block)
        self._blocks, self._row_blocks = Segments.blocks(block, rows.ways * row), Segments.blocks(block, row)
        super().__init__(rows, feedback, block, (self._row_blocks.count, rows.dtype), row // 8)

    def _encode(self, residual: torch.Tensor, x: torch.Tensor) -> Coded:
        bits, scales = onebit.compress(residual, x, self._blocks)
        _clear(x, self._gaps)
        return scales.view(self.rows.ways, -1), bits.view(self.rows.ways, -1)

    def _sum(self, scales: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return _clear(onebit.average(values, scales, self._row_blocks), self._row_gaps)

    def _sum_encode(self, scales: torch.Tensor, values: torch.Tensor, residual: torch.Tensor) -> Coded:
        bits, made = onebit.average_compress(values, scales, residual, self._row_blocks)
        _clear(residual, self._row_gaps)
        return made, bits

    def _decode(self, scales: torch.Tensor, values: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        return _clear(onebit.decompress(values.reshape(-1), scales.reshape(-1), self._blocks, out=out), self._gaps)

    @cached_property
    def _gaps(self) -> list[tuple[int, int]]:
        return _gaps(self.rows.spans(self._block), self._length)

    @cached_property
    def _row_gaps(self) -> list[tuple[int, int]]:
        """The gaps in this rank's row."""
        first, stop = self.rows.index * self.row, (self.rows.index + 1) * self.row
        clipped = [(max(start, first) - first, min(end, stop) - first) for start, end in self._gaps]
        return [(start, end) for start, end in clipped if start < end]


class _Blocks(BoundTwoPhase):
    """Integers with one scale per block of elements. Padding is 0 and stays 0."""

    def __init__(self, rows: Rows, feedback: bool, form: Blockwise) -> None:
        self._form, row = form, rows.row(form.block)
        super().__init__(rows, feedback, form.block, (form.scales(row), torch.float32), form.bytes(row))

    def _encode(self, residual: torch.Tensor, x: torch.Tensor) -> Coded:
        values, scales = quantize.quantize(residual, self._form, x)
        return scales.view(self.rows.ways, -1), values.view(torch.uint8).view(self.rows.ways, -1)

    def _sum(self, scales: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return quantize.dequantize_sum(self._typed(values), scales, self._form, self.row)

    def _sum_encode(self, scales: torch.Tensor, values: torch.Tensor, residual: torch.Tensor) -> Coded:
        sent = self._typed(values), scales, self._form, self.row
        made, made_scales = quantize.dequantize_sum_quantize(*sent, self._form, residual)
        return made_scales, made.view(torch.uint8)

    def _decode(self, scales: torch.Tensor, values: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        sent = self._typed(values).view(-1), scales.reshape(-1), self._form, self._length
        return quantize.dequantize(*sent, out=out)

    def _typed(self, values: torch.Tensor) -> torch.Tensor:
        return values.contiguous().view(self._form.dtype)


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
