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


class WrappedGroup:
    """A transport around another one, whose exchanges all pass `exchange`."""

    group: Group
    size: int
    rank: int

    def __init__(self, group: Group) -> None:
        self.group, self.size, self.rank = group, group.size, group.rank

    def exchange(self, op: str, out: Any, inp: Any, start: Callable[[], Work], about: Any = None) -> Work:
        """Start an exchange.

        Args:
            out, inp: its tensors, or objects.
            about: the source of a broadcast, the pairs of a permutation, the splits of an uneven all-to-all, or the peer and
                the tag of a message.
        """
        return start()

    def all_reduce(self, tensor: torch.Tensor) -> Work:
        return self.exchange("all_reduce", tensor, tensor, lambda: self.group.all_reduce(tensor))

    def all_gather(self, out: torch.Tensor, inp: torch.Tensor) -> Work:
        return self.exchange("all_gather", out, inp, lambda: self.group.all_gather(out, inp))

    def reduce_scatter(self, out: torch.Tensor, inp: torch.Tensor) -> Work:
        return self.exchange("reduce_scatter", out, inp, lambda: self.group.reduce_scatter(out, inp))

    def all_to_all(self, out: torch.Tensor, inp: torch.Tensor, splits: Splits | None = None) -> Work:
        more = () if splits is None else (splits,)  # a user's own transport may know equal chunks alone
        return self.exchange("all_to_all", out, inp, lambda: self.group.all_to_all(out, inp, *more), splits)

    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        return self.exchange("broadcast", tensor, tensor, lambda: self.group.broadcast(tensor, source), source)

    def permute(self, out: torch.Tensor, inp: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> Work:
        return self.exchange("permute", out, inp, lambda: self.group.permute(out, inp, pairs), tuple(pairs))

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Work:
        return self.exchange("send", None, tensor, lambda: self.group.send(tensor, peer, tag), (peer, tag))

    def recv(self, out: torch.Tensor, peer: int, tag: int) -> Work:
        return self.exchange("recv", out, None, lambda: self.group.recv(out, peer, tag), (peer, tag))

    def all_gather_object(self, value: Any) -> list[Any]:
        values: list[Any] = []
        gather = Work(lambda: values.extend(self.group.all_gather_object(value)))
        self.exchange("all_gather_object", values, value, lambda: gather).wait()
        return values
