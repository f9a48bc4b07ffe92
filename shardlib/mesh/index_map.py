"""Where a rank's elements of a parameter lie in it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from shardlib.mesh.pieces import pieces


class Box(NamedTuple):
    """Whole rows (along dimension 0) of a slice of a parameter.

    Attributes:
        shape: how many rows, and the slice's other sizes.
        first: where it begins in each dimension of the parameter.
        skip: elements of it that come before those it was made for.
    """

    shape: tuple[int, ...]
    first: tuple[int, ...]
    skip: int

    def without(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """The part (a view) of a tensor that has the parameter's dimensions but for ``dim``."""
        dims = [place for place in range(len(self.shape)) if place != dim]
        for place, own in enumerate(dims):
            tensor = tensor.narrow(place, self.first[own], self.shape[own])
        return tensor


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

    def pieces(self, tensor: torch.Tensor) -> Iterator[tuple[torch.Tensor, Places]]:
        """A contiguous tensor of these elements as flat views of some thousands of them, each with its places."""
        done = 0
        for (piece,) in pieces((tensor,)) if tensor.numel() else ():
            yield piece.view(-1), self.after(done)
            done += piece.numel()

    def box(self, count: int) -> Box:
        """The fewest rows that hold the first ``count`` elements."""
        inner = math.prod(self.sizes[1:])
        row, skip = divmod(self.start, max(inner, 1))
        rows = -(-(skip + count) // max(inner, 1))
        return Box((rows, *self.sizes[1:]), (self.first[0] + row, *self.first[1:]), skip)

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
