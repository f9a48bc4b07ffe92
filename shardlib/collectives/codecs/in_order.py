"""Sums over one axis whose bits do not depend on the transport: rows are exchanged as they are and added in a fixed order.

Row r goes to rank r (all-to-all), which adds the rows up as `tree_sum` does. Where rows are scattered, this is all; else
every rank's row of the sum goes to all ranks (all-gather). A rank sends what a bandwidth-optimal reduce-scatter or
all-reduce sends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from shardlib.collectives import primitives
from shardlib.collectives.codecs.base import Item, Kept, Residuals, Rows
from shardlib.mesh.mesh import Mesh


def tree_sum(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of two or more tensors in a binary tree, in new memory: neighbours are added, then neighbouring sums.

    The last one, where it has no neighbour, goes up as it is. May use up the memory of ``rows``.
    """
    while len(rows) > 2:
        pairs = zip(rows[::2], rows[1::2])
        rows = [*(left.add_(right) for left, right in pairs), *rows[len(rows) // 2 * 2 :]]
    return torch.add(*rows)


@dataclass(frozen=True)
class InOrder:
    """Values as they are, added in one order."""

    wide: ClassVar[bool] = True
    whole: ClassVar[bool] = False

    def __str__(self) -> str:
        return "full precision, added in one order"

    def bind(self, rows: Rows) -> BoundInOrder:
        return BoundInOrder(rows)

    def exchange(self, mesh: Mesh, axis: str, items: Sequence[Item[BoundInOrder]], residuals: Residuals) -> OrderedSums:
        return OrderedSums(mesh, axis, items)


@dataclass(frozen=True)
class BoundInOrder:
    """`InOrder` bound to a buffer. It keeps nothing."""

    rows: Rows
    keeps: ClassVar[tuple[Kept, ...]] = ()

    @property
    def payload(self) -> int:
        times = 1 if self.rows.scattered else 2
        return times * (self.rows.ways - 1) * self.rows.row(1) * self.rows.dtype.itemsize

    def pad(self, x: torch.Tensor) -> torch.Tensor:
        return self.rows.pad(x, 1)

    def start(self, device: torch.device) -> list[torch.Tensor]:
        return []


class OrderedSums:
    """The sums of some buffers over ``axis``, under way."""

    def __init__(self, mesh: Mesh, axis: str, items: Sequence[Item[BoundInOrder]]) -> None:
        self._mesh, self._axis, self._items = mesh, axis, items
        self._arrived = [torch.empty_like(item.buffer) for item in items]
        self._works = [
            primitives.all_to_all(mesh, axis, arrived, item.buffer)
            for arrived, item in zip(self._arrived, items, strict=True)
        ]

    def wait(self, out: Sequence[torch.Tensor | None] | None = None) -> list[torch.Tensor]:
        """Each item's sum: see `shardlib.collectives.codecs.base.Exchange.wait`."""
        rows = [self._sum(number) for number in range(len(self._items))]
        if self._items[0].codec.rows.scattered:
            return rows
        wholes = [row.new_empty(item.buffer.numel()) for row, item in zip(rows, self._items)]
        works = [primitives.all_gather(self._mesh, self._axis, *pair) for pair in zip(wholes, rows, strict=True)]
        for work in works:
            work.wait()
        sums = [whole[: item.codec.rows.elements] for whole, item in zip(wholes, self._items)]
        return [total if into is None else into.copy_(total) for total, into in zip(sums, out or [None] * len(sums))]

    def _sum(self, number: int) -> torch.Tensor:
        self._works[number].wait()
        return tree_sum(self._arrived[number].view(self._items[number].codec.rows.ways, -1).unbind())
