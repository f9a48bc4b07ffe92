"""Where a rank's elements of a parameter lie in it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Places:
    """Consecutive elements of a slice of a parameter, in row-major order.

    Attributes:
        shape: of the parameter.
        first, sizes: the slice: its first index and its size in each dimension.
        start: the number in the slice of the first element.
    """

    shape: tuple[int, ...]
    first: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int

    @classmethod
    def of_whole(cls, shape: tuple[int, ...]) -> Places:
        return cls(shape, (0,) * len(shape), shape, 0)

    def after(self, count: int) -> Places:
        """Those that follow the first ``count`` elements."""
        return replace(self, start=self.start + count)

    def flat(self, count: int, device: torch.device) -> torch.Tensor:
        """The numbers of the first ``count`` elements in the flattened parameter, int64 ``[count]``."""
        numbers = torch.arange(self.start, self.start + count, device=device)
        if self.sizes == self.shape:
            return numbers
        found, stride = torch.zeros_like(numbers), math.prod(self.shape)
        inner = math.prod(self.sizes)
        for size, first, whole in zip(self.sizes, self.first, self.shape, strict=True):
            stride, inner = stride // whole, inner // size
            found += (numbers // inner % size + first) * stride
        return found
