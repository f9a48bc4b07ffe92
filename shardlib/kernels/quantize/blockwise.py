"""The layout of blockwise quantised values."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Blockwise:
    """Symmetric integers with one fp32 scale per block of consecutive elements.

    Attributes:
        bits: 8, one int8 per element; or 4, two elements to a uint8, the first in the low half.
        block: elements per scale, a power of two from 16 to 4096; the last block may be shorter.
    """

    bits: int
    block: int = 128

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise ValueError(f"bits={self.bits}: values have 4 or 8 bits")
        if not 16 <= self.block <= 4096 or self.block & (self.block - 1):
            raise ValueError(f"blocks of {self.block} elements: take a power of two from 16 to 4096")

    @property
    def largest(self) -> int:
        """Magnitude of the largest value: 127 or 7."""
        return 2 ** (self.bits - 1) - 1

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the stored values."""
        return torch.int8 if self.bits == 8 else torch.uint8

    def bytes(self, elements: int) -> int:
        """The bytes that the values of ``elements`` take."""
        return -(-elements * self.bits // 8)

    def scales(self, elements: int) -> int:
        """The number of scales of ``elements``."""
        return -(-elements // self.block)
