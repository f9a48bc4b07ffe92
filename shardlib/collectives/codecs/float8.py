"""A codec of 8-bit floats, e4m3 with one scale per block. Messages are as in `shardlib.collectives.codecs.integers`.

q = fp8(c / s) with s = max|c| / 448, where 448 is the largest e4m3 value. The mantissa has 3 bits everywhere in a block's
range, where int8 has 7 near the largest element and none near zero. Written in plain PyTorch: the casts are instructions on
GPUs from sm_89 on, and loops elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from shardlib.collectives.codecs.base import BoundTwoPhase, Rows, TwoPhase
from shardlib.collectives.codecs.integers import BoundPadded, joined, padded, rows_of, split

_FP8, _LARGEST = torch.float8_e4m3fn, 448.0


@dataclass(frozen=True)
class Float8(TwoPhase):
    """A codec and packing of 8-bit floats.

    Attributes:
        block: elements per scale.
        feedback: whether residuals are kept.
    """

    block: int = 128
    feedback: bool = True
    wide: ClassVar[bool] = False

    def bind(self, rows: Rows) -> BoundTwoPhase:
        return _Float8Blocks(rows, self.feedback, self.block)

    def size(self, elements: int) -> int:
        return 4 * -(-elements // self.block) + elements

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        rows = rows_of(x)
        whole = padded(rows.float(), -rows.shape[1] % self.block)
        values, scales = _encode(whole.view(-1, self.block))
        sent = values.view(torch.uint8).view(whole.shape)[:, : rows.shape[1]]
        per_row = scales.view(len(rows), whole.shape[1] // self.block)
        return joined(per_row, sent).view(*x.shape[:-1], self.size(x.shape[-1]))

    def unpack(self, message: torch.Tensor, out: torch.Tensor) -> None:
        rows = rows_of(out)
        scales, values = split(rows_of(message), -(-rows.shape[1] // self.block), torch.float32)
        whole = padded(values, -rows.shape[1] % self.block).contiguous().view(_FP8).view(*scales.shape, self.block)
        rows.copy_((whole.float() * scales[..., None]).flatten(1)[:, : rows.shape[1]])

    def __str__(self) -> str:
        return f"fp8, a scale per {self.block} elements{'' if self.feedback else ', no error feedback'}"


class _Float8Blocks(BoundPadded):
    """8-bit floats with one scale per block of elements."""

    def __init__(self, rows: Rows, feedback: bool, block: int) -> None:
        super().__init__(rows, feedback, block)
        self._block, self._scales = block, self.row // block
        width = 4 * self._scales + self.row
        self.widths = (width, width)

    def encode(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return joined(*self._encode_rows(x.add_(residual), self.rows.ways))

    def add(self, messages: torch.Tensor) -> torch.Tensor:
        return self.rows.unpadded(self._add(messages))

    def add_encode(self, messages: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return joined(*self._encode_rows(residual.add_(self._add(messages)), 1))[0]

    def decode(self, messages: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return self.unpadded(self._values(messages).reshape(-1), out)

    def _encode_rows(self, c: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The scales and bytes of ``rows`` rows. Writes the residual over ``c``."""
        blocks = c.view(-1, self._block)
        values, scales = _encode(blocks)
        residual = blocks - values.float() * scales[:, None]
        blocks.copy_(torch.where(scales.isfinite()[:, None], residual, blocks))
        return scales.view(rows, -1), values.view(torch.uint8).view(rows, -1)

    def _add(self, messages: torch.Tensor) -> torch.Tensor:
        """The sum (or mean) of the ranks' rows, added in the order of the ranks."""
        first, *others = self._values(messages, self.rows.ways if self.rows.mean else 1)
        return sum(others, start=first)

    def _values(self, messages: torch.Tensor, divisor: int = 1) -> torch.Tensor:
        """The decoded messages over ``divisor``, ``[rows, row]``."""
        scales, values = split(messages, self._scales, torch.float32)
        scales = scales / divisor
        blocks = values.contiguous().view(_FP8).float().view(len(messages), -1, self._block)
        return (blocks * scales[..., None]).view(len(messages), -1)


def _encode(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values ``[n, block]`` and scales ``[n]`` of blocks ``[n, block]``. A block of zeros has the scale 0."""
    scales = blocks.abs().amax(dim=1) / _LARGEST
    divisors = torch.where(scales > 0, scales, 1.0)
    return (blocks / divisors[:, None]).clamp(-_LARGEST, _LARGEST).to(_FP8), scales
