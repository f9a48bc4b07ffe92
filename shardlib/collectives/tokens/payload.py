"""The payload of exchanges that hop from axis to axis, as pure functions of the number of rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch


class Payload(NamedTuple):
    """Bytes that one rank sends along each axis, for one layer and one micro-batch.

    Attributes:
        sizes: of the messages that say how many rows come; in a forward alone.
        there: of rows to their experts in a forward; in a backward, of the gradients of results.
        back: of results in a forward; in a backward, of the gradients of rows.
    """

    sizes: Mapping[str, int]
    there: Mapping[str, int]
    back: Mapping[str, int]

    @property
    def forward(self) -> dict[str, int]:
        """Axis -> bytes of a forward."""
        return {axis: sent + self.sizes[axis] for axis, sent in self.backward.items()}

    @property
    def backward(self) -> dict[str, int]:
        """Axis -> bytes of a backward."""
        return {axis: sent + self.back[axis] for axis, sent in self.there.items()}


def rows_sent(ways: Sequence[int], place: Sequence[int], counts: torch.Tensor) -> tuple[list[int], list[int]]:
    """The rows that a rank sends to other ranks on each hop, to the experts and back.

    Hop k takes a row from the rank at (d_1 … d_k−1, s_k … s_m) to that at (d_1 … d_k, s_k+1 … s_m), where s is the place of
    the row's source and d that of its owner.

    Args:
        ways: sizes of the axes.
        place: the rank's coordinates along them.
        counts: ``[ranks, E]``: how many rows each rank has for each expert.
    """
    ranks, hops = math.prod(ways), range(len(ways))
    table = counts.view(ranks, ranks, -1).sum(-1).view(*ways, *ways)
    free: list[Any] = [slice(None)]
    there = [table[*free * k, *place[k:], *place[:k]] for k in hops]
    back = [table[*free * (k + 1), *place[k + 1 :], *place[: k + 1]] for k in hops]
    return _to_others(there, place), _to_others(back, place)


def most_rows_sent(ways: Sequence[int], rows: int) -> tuple[list[int], list[int]]:
    """The most that `rows_sent` can be where no rank has more than ``rows`` rows."""
    held = [math.prod(ways[:k]) * rows for k in range(len(ways))]  # on a rank, if all come to it
    there = [most if size > 1 else 0 for most, size in zip(held, ways, strict=True)]
    return there, [most * (size - 1) for most, size in zip(held, ways, strict=True)]


def _to_others(tables: Iterable[torch.Tensor], place: Sequence[int]) -> list[int]:
    """The sum of table k without what dimension k has at the rank's own place."""
    return [int(table.sum() - table.select(k, place[k]).sum()) for k, table in enumerate(tables)]
