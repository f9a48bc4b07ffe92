"""`IndexMap`: the elements of a whole parameter that a rank holds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from shardlib.common.chunks import chunks
from shardlib.mesh.specs import Window


class Box(NamedTuple):
    """Whole rows (along dimension 0) of a slice of a parameter, which hold some consecutive elements of the slice.

    Attributes:
        shape: the number of rows, and the slice's sizes in the other dimensions.
        first: the box's first index in each dimension of the parameter.
        skip: elements of the box before the consecutive elements.
    """

    shape: tuple[int, ...]
    first: tuple[int, ...]
    skip: int

    def without(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """The view of ``tensor`` that this box covers; ``tensor`` has the parameter's dimensions except ``dim``."""
        kept = [param_dim for param_dim in range(len(self.shape)) if param_dim != dim]
        for tensor_dim, param_dim in enumerate(kept):
            tensor = tensor.narrow(tensor_dim, self.first[param_dim], self.shape[param_dim])
        return tensor


@dataclass(frozen=True)
class IndexMap:
    """Consecutive elements of a slice of a parameter, in row-major order, and their indices in the parameter.

    Attributes:
        window: the slice.
        start: the index in the flattened slice of the first element.
    """

    window: Window
    start: int

    @classmethod
    def of_whole(cls, shape: tuple[int, ...]) -> IndexMap:
        """The map of all elements of a parameter that is not sliced."""
        return cls(Window.whole(shape), 0)

    @property
    def shape(self) -> tuple[int, ...]:
        """The parameter's shape."""
        return self.window.shape

    def chunks(self, tensor: torch.Tensor) -> Iterator[tuple[torch.Tensor, IndexMap]]:
        """Flat views of a contiguous tensor that holds the mapped elements, a chunk each, with each chunk's own map."""
        done = 0
        for (chunk,) in chunks((tensor,)) if tensor.numel() else ():
            yield chunk.view(-1), self.after(done)
            done += chunk.numel()

    def box(self, count: int) -> Box:
        """The fewest rows that hold the first ``count`` elements."""
        _, first, sizes = self.window
        inner = math.prod(sizes[1:])
        row, skip = divmod(self.start, max(inner, 1))
        rows = -(-(skip + count) // max(inner, 1))
        return Box((rows, *sizes[1:]), (first[0] + row, *first[1:]), skip)

    def after(self, count: int) -> IndexMap:
        """The map of the elements that follow the first ``count``."""
        return replace(self, start=self.start + count)

    def flat(self, count: int, device: torch.device | None = None) -> torch.Tensor:
        """Indices in the flattened parameter of the first ``count`` elements, int64 ``[count]``."""
        numbers = torch.arange(self.start, self.start + count, device=device)
        shape, first, sizes = self.window
        if sizes == shape or not count:
            return numbers
        indices, stride, inner = torch.zeros_like(numbers), math.prod(shape), math.prod(sizes)
        for size, offset, whole in zip(sizes, first, shape, strict=True):
            stride, inner = stride // whole, inner // size
            indices += (numbers // inner % size + offset) * stride
        return indices
