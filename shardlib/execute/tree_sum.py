"""The sum of a gradient over micro-batches in a binary tree."""

from __future__ import annotations

import torch


class TreeSum:
    """The sum of one tensor for each of ``count`` micro-batches: neighbours are added, then neighbouring sums, and so on.

    The last one, where it has no neighbour, goes up as it is. Two sums are added as soon as both are there, so that after
    micro-batches in order as many sums are held as their number has binary ones.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._nodes: dict[tuple[int, int], torch.Tensor] = {}  # (height, index) -> sum

    @property
    def nodes(self) -> list[torch.Tensor]:
        """The sums that are held."""
        return list(self._nodes.values())

    def add(self, index: int, leaf: torch.Tensor) -> torch.Tensor:
        """Add the tensor of one micro-batch, whose memory may be used up; returns the highest sum that it completes.

        The sum of all micro-batches is no longer held.
        """
        node, width = leaf, self._count  # width: the number of nodes at this height
        height = 0
        while width > 1:
            sibling = index ^ 1
            if sibling < width:
                other = self._nodes.pop((height, sibling), None)
                if other is None:
                    self._nodes[height, index] = node
                    break
                node = other.add_(node)
            height, index, width = height + 1, index // 2, (width + 1) // 2
        return node
