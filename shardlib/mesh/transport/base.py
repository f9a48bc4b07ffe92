"""The interface of a transport. Buffers are contiguous; a call returns at once with a `Work` to wait on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch


class Work:
    """An exchange under way. `wait` returns once the output may be used; a second `wait` does nothing."""

    def __init__(self, finish: Callable[[], None] | None = None) -> None:
        self._finish = finish

    def wait(self) -> None:
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()


class Splits(NamedTuple):
    """How an uneven all-to-all is split: the elements that go to each rank, and those that come from each, in rank order."""

    sent: Sequence[int]
    received: Sequence[int]


class Group(Protocol):
    """The ranks along one mesh axis (or several, flattened), numbered 0 to ``size - 1``.

    Inputs must not change, and outputs must not be read, until the caller has waited for the returned work. All ranks of a
    group make the same calls in the same order, except `send` and `recv`.
    """

    size: int
    rank: int

    def all_reduce(self, tensor: torch.Tensor) -> Work:
        """Sum ``tensor`` over the group, in place."""
        ...

    def all_gather(self, out: torch.Tensor, inp: torch.Tensor) -> Work:
        """``out = concat(inp of rank 0, inp of rank 1, ...)``; ``out`` has ``size`` × the elements of ``inp``."""
        ...

    def reduce_scatter(self, out: torch.Tensor, inp: torch.Tensor) -> Work:
        """``out = sum over ranks of chunk self.rank of their inp``; ``inp`` has ``size`` × the elements of ``out``."""
        ...

    def all_to_all(self, out: torch.Tensor, inp: torch.Tensor, splits: Splits | None = None) -> Work:
        """Chunk ``j`` of ``inp`` goes to rank ``j``; chunk ``i`` of ``out`` comes from rank ``i``.

        Chunks are equal, or of the sizes in ``splits``, any of which may be 0. Those of all ranks must fit: rank ``i`` sends
        rank ``j`` as many elements as ``j`` receives from ``i``.
        """
        ...

    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        """Overwrite ``tensor`` with rank ``source``'s tensor."""
        ...

    def permute(self, out: torch.Tensor, inp: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> Work:
        """Send ``inp`` along ``(source, destination)`` pairs; ``out`` is zero where nothing arrives."""
        ...

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Work:
        """Send ``tensor`` to rank ``peer``, without waiting for the peer. Only the two ranks take part.

        Between two ranks, in one direction, receives are posted in the order of the sends. ``tag``, at least 0, distinguishes
        messages where the transport can.
        """
        ...

    def recv(self, out: torch.Tensor, peer: int, tag: int) -> Work:
        """Overwrite ``out`` with the tensor that rank ``peer`` sends under ``tag``, of as many elements and the same
        dtype."""
        ...

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order. Blocks until all have arrived. For small picklable values."""
        ...
