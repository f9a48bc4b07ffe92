"""Collectives between the ranks of a `Simulation`, computed for all ranks by the last one to call.

Since the simulator sees every rank, two ranks that call different collectives raise at once an error that names both.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardlib.common._compat import no_modes
from shardlib.common.dtypes import dtype_name
from shardlib.errors import RankMismatch, listing
from shardlib.mesh.transport.activity import here
from shardlib.mesh.transport.base import Splits, Work
from shardlib.mesh.transport.simulation import Simulation


@dataclass
class _Round:
    """One collective of a group: the first rank to call, its call's signature and names, and what each member gave."""

    signature: str
    first: int
    label: str
    members: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    complete: bool = False


class _GroupCalls:
    """The calls made so far on one group, shared by its members."""

    def __init__(self) -> None:
        self.rounds: dict[int, _Round] = {}
        # (source, destination, tag) -> messages that were sent and not yet received, oldest first.
        self.boxes: dict[tuple[int, int, int], deque[torch.Tensor]] = {}


class SimulatedGroup:
    """One simulated rank's view of a group.

    Args:
        simulation: the scheduler all ranks share.
        exchange: the group's shared record of calls, from `SimulatedGroup.exchange`.
        members: global ranks of the group, in group order.
        rank: this rank's index among them.
        axis: the mesh axis, for messages.
    """

    exchange = _GroupCalls

    def __init__(
        self, simulation: Simulation, exchange: _GroupCalls, members: Sequence[int], rank: int, axis: str
    ) -> None:
        self.size = len(members)
        self.rank = rank
        self._simulation = simulation
        self._exchange = exchange
        self._members = members
        self._axis = axis
        self._calls = 0

    def all_reduce(self, tensor: torch.Tensor) -> Work:
        return self._post("all_reduce", tensor, tensor, lambda inputs, rank: torch.stack(inputs).sum(0))

    def all_gather(self, out: torch.Tensor, inp: torch.Tensor) -> Work:
        return self._post("all_gather", out, inp, lambda inputs, rank: torch.cat(inputs))

    def reduce_scatter(self, out: torch.Tensor, inp: torch.Tensor) -> Work:
        def chunk(inputs: list[torch.Tensor], rank: int) -> torch.Tensor:
            return torch.stack([value.chunk(self.size)[rank] for value in inputs]).sum(0)

        return self._post("reduce_scatter", out, inp, chunk)

    def all_to_all(self, out: torch.Tensor, inp: torch.Tensor, splits: Splits | None = None) -> Work:
        if splits is not None:
            return self._uneven(out, inp, splits)

        def chunks(inputs: list[torch.Tensor], rank: int) -> torch.Tensor:
            return torch.cat([value.chunk(self.size)[rank] for value in inputs])

        return self._post("all_to_all", out, inp, chunks)

    def _uneven(self, out: torch.Tensor, inp: torch.Tensor, splits: Splits) -> Work:
        self._require_contiguous("all_to_all", out, inp)

        def finish(members: dict[int, Any]) -> None:
            self._require_fit([members[rank][2] for rank in range(self.size)])
            with torch.no_grad(), no_modes():
                chunks = [members[rank][0].reshape(-1).split(list(members[rank][2].sent)) for rank in range(self.size)]
                for rank in range(self.size):
                    members[rank][1].view(-1).copy_(torch.cat([sent[rank] for sent in chunks]))

        signature = f"uneven all_to_all({dtype_name(inp.dtype)})"
        return self._call(signature, (inp.detach(), out.detach(), splits), finish)

    def _require_fit(self, splits: list[Splits]) -> None:
        """Fail the simulation where a rank sends another number of elements than the other rank receives."""
        unfit = [
            f"rank {self._members[source]} sends rank {self._members[target]} {splits[source].sent[target]} elements, and "
            f"rank {self._members[target]} receives {splits[target].received[source]}"
            for source in range(self.size)
            for target in range(self.size)
            if splits[source].sent[target] != splits[target].received[source]
        ]
        if unfit:
            me = self._members[self.rank]
            error = RankMismatch(f"splits of an all_to_all on axis {self._axis!r} do not fit: {listing(unfit)}")
            self._simulation.fail(me, error)
            raise error

    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        return self._post(f"broadcast from {source}", tensor, tensor, lambda inputs, rank: inputs[source])

    def permute(self, out: torch.Tensor, inp: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> Work:
        def move(inputs: list[torch.Tensor], rank: int) -> torch.Tensor:
            sources = [source for source, destination in pairs if destination == rank]
            return inputs[sources[0]] if sources else torch.zeros_like(inputs[rank])

        return self._post(f"permute {tuple(pairs)}", out, inp, move)

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Work:
        self._require_contiguous("send", tensor)
        box = self._exchange.boxes.setdefault((self.rank, peer, tag), deque())
        box.append(tensor.detach().clone())
        return Work()

    def recv(self, out: torch.Tensor, peer: int, tag: int) -> Work:
        self._require_contiguous("recv", out)
        box = self._exchange.boxes.setdefault((peer, self.rank, tag), deque())
        me, target = self._members[self.rank], out.detach()
        what = (
            f"recv({out.numel()} × {dtype_name(out.dtype)}) from rank {self._members[peer]} "
            f"on axis {self._axis!r} (tag {tag}{here().label})"
        )

        def finish() -> None:
            self._simulation.block(me, lambda: bool(box), what)
            sent = box.popleft()
            if sent.numel() != target.numel() or sent.dtype is not target.dtype:
                error = RankMismatch(
                    f"rank {me} waits in {what}, and {sent.numel()} × {dtype_name(sent.dtype)} were sent. "
                    "Send and receive the same number of elements, of the same dtype."
                )
                self._simulation.fail(me, error)
                raise error
            with torch.no_grad():
                target.copy_(sent.view_as(target))

        return Work(finish)

    def all_gather_object(self, value: Any) -> list[Any]:
        got: list[Any] = []

        def finish(members: dict[int, Any]) -> None:
            values = [members[rank][0] for rank in range(self.size)]
            for rank in range(self.size):
                members[rank][1].extend(values)

        self._call("all_gather_object", (value, got), finish).wait()
        return got

    def _post(
        self,
        name: str,
        out: torch.Tensor,
        inp: torch.Tensor,
        result: Callable[[list[torch.Tensor], int], torch.Tensor],
    ) -> Work:
        self._require_contiguous(name, out, inp)
        signature = f"{name}({inp.numel()} × {dtype_name(inp.dtype)})"

        def finish(members: dict[int, Any]) -> None:
            # The last rank to call computes for all ranks, which its dispatch modes (a recompute policy) must not see.
            with torch.no_grad(), no_modes():
                inputs = [members[rank][0].reshape(-1) for rank in range(self.size)]
                # All results are computed before any is written: all_reduce and broadcast write over their inputs.
                results = [result(inputs, rank) for rank in range(self.size)]
                for rank, value in enumerate(results):
                    members[rank][1].copy_(value.view_as(members[rank][1]))

        return self._call(signature, (inp.detach(), out.detach()), finish)

    def _require_contiguous(self, name: str, *buffers: torch.Tensor) -> None:
        """Refuse what ranks in processes of their own cannot exchange.

        Raises:
            ValueError: a buffer is not contiguous.
        """
        for buffer in buffers:
            if not buffer.is_contiguous():
                raise ValueError(
                    f"{name} on axis {self._axis!r}: {tuple(buffer.shape)} with strides {buffer.stride()} is not contiguous, "
                    "which ranks in processes of their own do not exchange: give tensor.contiguous()"
                )

    def _call(self, signature: str, entry: tuple[Any, ...], finish: Callable[[dict[int, Any]], None]) -> Work:
        number = self._calls
        self._calls += 1
        me = self._members[self.rank]
        label = here().label
        current = self._exchange.rounds.setdefault(number, _Round(signature, me, label))
        if current.signature != signature:
            error = RankMismatch(
                f"ranks call different collectives on axis {self._axis!r} (call {number + 1}): "
                f"rank {current.first} calls {current.signature}{current.label}; rank {me} calls {signature}{label}. "
                "Every rank along an axis must make the same calls, of the same sizes, in the same order."
            )
            self._simulation.fail(me, error)
            raise error
        current.members[self.rank] = entry
        if len(current.members) == self.size:
            finish(current.members)
            current.complete = True
            current.members = {}
            del self._exchange.rounds[number]
        what = f"{signature} on axis {self._axis!r} (call {number + 1}{here().label})"
        return Work(lambda: self._simulation.block(me, lambda: current.complete, what))
