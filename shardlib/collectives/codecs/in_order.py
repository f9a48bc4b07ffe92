"""Sums over one axis whose bits do not depend on the transport: rows are exchanged as they are and added in a fixed order.

Row r goes to rank r (all-to-all), which adds the rows up in the tree of `shardlib.collectives.tree_sum`. Where rows are
scattered, this is all; else every rank's row of the sum goes to all ranks (all-gather). A rank whose micro-batches are one
node of the tree sends what a bandwidth-optimal reduce-scatter or all-reduce sends, and one whose are several sends each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch

from shardlib.collectives import primitives
from shardlib.collectives.codecs.base import Item, Kept, Residuals, Rows
from shardlib.collectives.tree_sum import TreeSum, joined, most_nodes, nodes_of
from shardlib.mesh.mesh import Mesh


@dataclass(frozen=True)
class InOrder:
    """Values as they are, added in one order.

    Attributes:
        leaves: number of micro-batches of all ranks, of which ranks hold equally many neighbours.
    """

    leaves: int
    wide: ClassVar[bool] = True
    whole: ClassVar[bool] = False

    def __str__(self) -> str:
        return "full precision, added in one order"

    def bind(self, rows: Rows) -> BoundInOrder:
        return BoundInOrder(rows, self.leaves)

    def exchange(self, mesh: Mesh, axis: str, items: Sequence[Item[BoundInOrder]], residuals: Residuals) -> OrderedSums:
        return OrderedSums(mesh, axis, items)


@dataclass(frozen=True)
class BoundInOrder:
    """`InOrder` bound to a buffer, which holds as many sums as `sent` says, one after another. It keeps nothing."""

    rows: Rows
    leaves: int
    keeps: ClassVar[tuple[Kept, ...]] = ()

    @cached_property
    def share(self) -> int:
        """The number of micro-batches that are summed in one rank's buffer."""
        return self.leaves // (self.rows.ways * self.rows.groups)

    @cached_property
    def sent(self) -> int:
        """The number of sums in a buffer; on a rank that has fewer the last ones are zeros, which nobody adds."""
        return most_nodes(self.leaves, self.share)

    @cached_property
    def left(self) -> int:
        """The number of sums in the result."""
        return most_nodes(self.leaves, self.share * self.rows.ways)

    @property
    def payload(self) -> int:
        times = self.sent if self.rows.scattered else self.sent + self.left
        return times * (self.rows.ways - 1) * self.rows.row(1) * self.rows.dtype.itemsize

    def pad(self, x: torch.Tensor) -> torch.Tensor:
        if self.rows.ways * self.rows.row(1) == self.rows.elements:
            return x
        return torch.cat([self.rows.pad(each, 1) for each in x.chunk(self.sent)])

    def start(self, device: torch.device) -> list[torch.Tensor]:
        return []

    def add(self, arrived: torch.Tensor) -> torch.Tensor:
        """The sums of all ranks' rows, one after another, in memory of their own.

        Args:
            arrived: ``[sent, ways, row]``: each rank's sums; used up.
        """
        tree = TreeSum[torch.Tensor](self.leaves)
        for rank in range(self.rows.ways):
            first = (self.rows.group * self.rows.ways + rank) * self.share
            for number, node in enumerate(nodes_of(self.leaves, first, self.share)):
                tree.add(node, arrived[number, rank])
        return joined(tree.sums, self.left)


class OrderedSums:
    """The sums of some buffers over ``axis``, under way."""

    def __init__(self, mesh: Mesh, axis: str, items: Sequence[Item[BoundInOrder]]) -> None:
        self._mesh, self._axis, self._items = mesh, axis, items
        self._arrived = [torch.empty_like(item.buffer) for item in items]
        self._works = [
            [
                primitives.all_to_all(mesh, axis, *pair)
                for pair in zip(arrived.chunk(item.codec.sent), item.buffer.chunk(item.codec.sent), strict=True)
            ]
            for arrived, item in zip(self._arrived, items, strict=True)
        ]

    def wait(self, out: Sequence[torch.Tensor | None] | None = None) -> list[torch.Tensor]:
        """Each item's sum: see `shardlib.collectives.codecs.base.SumsUnderWay.wait`."""
        rows = [self._sum(number) for number in range(len(self._items))]
        if self._items[0].codec.rows.scattered:
            return rows
        gathered = [self._gather(row, item.codec) for row, item in zip(rows, self._items, strict=True)]
        sums = []
        for (wholes, works), item in zip(gathered, self._items, strict=True):
            for work in works:
                work.wait()
            sums.append(wholes[:, : item.codec.rows.elements].reshape(-1))
        return [total if into is None else into.copy_(total) for total, into in zip(sums, out or [None] * len(sums))]

    def _sum(self, number: int) -> torch.Tensor:
        for work in self._works[number]:
            work.wait()
        codec = self._items[number].codec
        return codec.add(self._arrived[number].view(codec.sent, codec.rows.ways, -1))

    def _gather(self, row: torch.Tensor, codec: BoundInOrder) -> tuple[torch.Tensor, list[primitives.Work]]:
        """All ranks' rows of the sums, ``[left, ways * row]``, under way."""
        wholes = row.new_empty(codec.left, row.numel() // codec.left * codec.rows.ways)
        pairs = zip(wholes.unbind(), row.chunk(codec.left), strict=True)
        return wholes, [primitives.all_gather(self._mesh, self._axis, *pair) for pair in pairs]
