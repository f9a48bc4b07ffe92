"""The exchanges of simulated ranks, with what went in and what came out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardlib.debug.notes import copied
from shardlib.mesh.mesh import Mesh
from shardlib.mesh.transport import Group, Splits, Work
from shardlib.mesh.transport.activity import here


@dataclass
class WireExchange:
    """One collective, as all ranks of a group make it.

    Attributes:
        op: the operation.
        axis: the mesh axis.
        about: the unit or leaf that it is for, as the executor names it.
        step: the step that it is part of.
        members: the world's numbers of the ranks, by their number in the group.
        sent, got: each rank's tensor before and after, by its number in the group.
        extra: the source of a broadcast, or the pairs of a permutation.
    """

    op: str
    axis: str
    about: str
    step: int | None
    extra: Any = None
    members: dict[int, int] = field(default_factory=dict)
    sent: dict[int, torch.Tensor] = field(default_factory=dict)
    got: dict[int, torch.Tensor] = field(default_factory=dict)

    def due(self, rank: int) -> torch.Tensor:
        """What a rank of the group is to get of what all sent, flat; in float64 where sums are rounded."""
        size = len(self.sent)
        sent = [self.sent[other].reshape(-1) for other in range(size)]
        if self.op == "all_reduce":
            return torch.stack(sent).sum(0)
        if self.op == "all_gather":
            return torch.cat(sent)
        if self.op == "reduce_scatter":
            return torch.stack(sent).sum(0).view(size, -1)[rank]
        if self.op == "all_to_all":
            return torch.cat([value.view(size, -1)[rank] for value in sent])
        if self.op == "broadcast":
            return sent[self.extra]
        sources = [source for source, target in self.extra if target == rank]
        return sent[sources[0]] if sources else torch.zeros_like(sent[rank])


class Wire:
    """All exchanges of a simulation, in the order in which their first rank made them."""

    def __init__(self) -> None:
        self.exchanges: list[WireExchange] = []
        self._of: dict[Any, WireExchange] = {}

    def watched(self, mesh: Mesh) -> Mesh:
        """A rank's view of the mesh whose exchanges are noted."""
        return mesh.with_transport(lambda axis, group: _Noted(self, mesh, axis, group))

    def note(self, key: Any, make: Callable[[], WireExchange]) -> WireExchange:
        if key not in self._of:
            self._of[key] = make()
            self.exchanges.append(self._of[key])
        return self._of[key]


class _Noted:
    """A group whose exchanges of equal parts are noted."""

    def __init__(self, wire: Wire, mesh: Mesh, axis: str, group: Group) -> None:
        self.size, self.rank = group.size, group.rank
        self._wire, self._group, self._axis, self._world = wire, group, axis, mesh.rank
        self._key = axis, tuple(sorted((a, c) for a, c in mesh.coords.items() if a != axis))
        self._count = 0

    def _noted(
        self, op: str, out: torch.Tensor, inp: torch.Tensor, start: Callable[[], Work], extra: Any = None
    ) -> Work:
        number, self._count = self._count, self._count + 1
        names = here()
        exchange = self._wire.note(
            (*self._key, number), lambda: WireExchange(op, self._axis, names.path, names.step, extra)
        )
        exchange.members[self.rank] = self._world
        exchange.sent[self.rank] = copied(inp)
        work = start()

        def finish() -> None:
            work.wait()
            exchange.got[self.rank] = copied(out)

        return Work(finish)

    def all_reduce(self, tensor: torch.Tensor) -> Work:
        return self._noted("all_reduce", tensor, tensor, lambda: self._group.all_reduce(tensor))

    def all_gather(self, out: torch.Tensor, inp: torch.Tensor) -> Work:
        return self._noted("all_gather", out, inp, lambda: self._group.all_gather(out, inp))

    def reduce_scatter(self, out: torch.Tensor, inp: torch.Tensor) -> Work:
        return self._noted("reduce_scatter", out, inp, lambda: self._group.reduce_scatter(out, inp))

    def all_to_all(self, out: torch.Tensor, inp: torch.Tensor, splits: Splits | None = None) -> Work:
        if splits is not None:
            return self._group.all_to_all(out, inp, splits)
        return self._noted("all_to_all", out, inp, lambda: self._group.all_to_all(out, inp))

    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        return self._noted("broadcast", tensor, tensor, lambda: self._group.broadcast(tensor, source), source)

    def permute(self, out: torch.Tensor, inp: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> Work:
        return self._noted("permute", out, inp, lambda: self._group.permute(out, inp, pairs), tuple(pairs))

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Work:
        return self._group.send(tensor, peer, tag)

    def recv(self, out: torch.Tensor, peer: int, tag: int) -> Work:
        return self._group.recv(out, peer, tag)

    def all_gather_object(self, value: Any) -> list[Any]:
        return self._group.all_gather_object(value)
