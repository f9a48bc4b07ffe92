"""The sum over micro-batches in one binary tree, whichever of them a rank holds.

The leaves of the tree are the M micro-batches of all ranks, in order. Neighbours are added, then neighbouring sums, and so
on; the last one, where it has no neighbour, goes up as it is:

    M = 6     0   1   2   3   4   5
               0+1     2+3     4+5
                  0…3          4+5
                        0…5

So neighbouring micro-batches make up some nodes of the tree and no others: of 1, 2, 3 the nodes 1 and 2+3, of 3, 4, 5 the
nodes 3 and 4+5. A rank sends its nodes as they are, and who receives those of neighbouring ranks goes on adding.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Generic, NamedTuple, TypeVar

import torch


class Node(NamedTuple):
    """A node of the tree: the sum of the leaves from ``place`` · 2**``height`` on, 2**``height`` of them or what is left."""

    height: int
    place: int


T = TypeVar("T", torch.Tensor, int)


class TreeSum(Generic[T]):
    """Sums of neighbouring leaves, each of which is a node of the tree.

    Two sums are added as soon as both are there, in any order of arrival. So after leaves in order, few sums are held.

    Args:
        leaves: the number of leaves of the whole tree.
    """

    def __init__(self, leaves: int) -> None:
        self._leaves = leaves
        self._held: dict[Node, T] = {}

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes that are held, in the order of their leaves. A node that has no neighbour stands for those above it."""
        return tuple(sorted(self._held, key=lambda node: node.place << node.height))

    @property
    def sums(self) -> list[T]:
        """The sums that are held, in the order of their leaves."""
        return [self._held[node] for node in self.nodes]

    def add(self, node: Node, value: T) -> None:
        """Add the sum of a node, a tensor whose memory may be used up."""
        height, place = node
        while (width := -(-self._leaves >> height)) > 1:  # the number of nodes at this height
            sibling = Node(height, place ^ 1)
            if sibling.place < width:
                if sibling not in self._held:
                    break
                other = self._held.pop(sibling)
                other += value
                value = other
            height, place = height + 1, place // 2
        self._held[Node(height, place)] = value


@cache
def nodes_of(leaves: int, first: int, count: int) -> tuple[Node, ...]:
    """The nodes that ``count`` neighbouring leaves make up, in order."""
    tree = TreeSum[int](leaves)
    for leaf in range(first, first + count):
        tree.add(Node(0, leaf), 1)
    return tree.nodes


@cache
def most_nodes(leaves: int, count: int) -> int:
    """The largest number of nodes that a rank's leaves make up, where each has ``count`` neighbours: 1 for a power of two."""
    return max(len(nodes_of(leaves, first, count)) for first in range(0, leaves, count))


@cache
def most_held(leaves: int, count: int) -> int:
    """The largest number of sums that a rank holds while it adds up its ``count`` neighbouring leaves one by one."""
    return max(len(nodes_of(leaves, first, n)) for first in range(0, leaves, count) for n in range(1, count + 1))


def joined(sums: Sequence[torch.Tensor], count: int) -> torch.Tensor:
    """Flat sums one after another in new memory, and zeros for those that are fewer than ``count``."""
    return torch.cat([*sums, sums[0].new_zeros((count - len(sums)) * len(sums[0]))])
