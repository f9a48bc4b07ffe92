"""A codec of 8-bit floats, e4m3 with one scale per block.

q = fp8(c / s) with s = max|c| / 448, where 448 is the largest e4m3 value. The mantissa has 3 bits everywhere in a block's
range, where int8 has 7 near the largest element and none near zero. Written in plain PyTorch: the casts are instructions on
GPUs from sm_89 on, and loops elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from shardlib.collectives.codecs.base import Rows
from shardlib.collectives.codecs.two_phase import BoundTwoPhase, Coded, TwoPhase, joined, padded, rows_of, split

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


class _Float8Blocks(BoundTwoPhase):
    """8-bit floats with one scale per block of elements."""

    def __init__(self, rows: Rows, feedback: bool, block: int) -> None:
        self._block, row = block, rows.row(block)
        super().__init__(rows, feedback, block, (row // block, torch.float32), row)

    def _encode(self, residual: torch.Tensor, x: torch.Tensor) -> Coded:
        scales, values = self._coded(x.add_(residual))
        return scales.view(self.rows.ways, -1), values.view(self.rows.ways, -1)

    def _sum(self, scales: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        first, *others = self._rows(scales, values)  # added in the order of the ranks
        return sum(others, start=first)

    def _sum_encode(self, scales: torch.Tensor, values: torch.Tensor, residual: torch.Tensor) -> Coded:
        return self._coded(residual.add_(self._sum(scales, values)))

    def _decode(self, scales: torch.Tensor, values: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        return self._rows(scales, values).reshape(-1)

    def _coded(self, c: torch.Tensor) -> Coded:
        """The scales and bytes of ``c``, flat; writes the residual over it."""
        blocks = c.view(-1, self._block)
        values, scales = _encode(blocks)
        residual = blocks - values.float() * scales[:, None]
        blocks.copy_(torch.where(scales.isfinite()[:, None], residual, blocks))
        return scales, values.view(torch.uint8).view(-1)

    def _rows(self, scales: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """The decoded messages, ``[rows, row]``."""
        blocks = values.contiguous().view(_FP8).float().view(len(values), -1, self._block)
        return (blocks * scales[..., None]).view(len(values), -1)


def _encode(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values ``[n, block]`` and scales ``[n]`` of blocks ``[n, block]``. A block of zeros has the scale 0."""
    scales = blocks.abs().amax(dim=1) / _LARGEST
    divisors = torch.where(scales > 0, scales, 1.0)
    return (blocks / divisors[:, None]).clamp(-_LARGEST, _LARGEST).to(_FP8), scales
