"""What one rank hears of its exchanges: a transport around each axis' own."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardlib.mesh.mesh import Traffic
from shardlib.mesh.transport import Group, Splits, Work
from shardlib.mesh.transport.activity import here
from shardlib.report.profile.timeline import Part, StepTimeline

MESSAGES = ("send", "recv")


@dataclass(slots=True)
class ProfiledExchange:
    """One exchange, as one rank made it.

    Attributes:
        op: the operation.
        axis: the mesh axis.
        name: what it is for.
        payload: bytes that this rank sends, as plans count them.
        scalars: bytes of a step's own numbers, which payloads exclude.
        peer: of a message, the other rank along the axis; else None.
        tag: of a message.
        start: when this rank began it, by `time.perf_counter`.
        end: when this rank had its result; None while it has not waited for it.
        waited: seconds that this rank waited for it.
    """

    op: str
    axis: str
    name: str
    payload: int
    scalars: int
    peer: int | None
    tag: int
    start: float
    end: float | None = None
    waited: float = 0.0


class Heard:
    """A transport that notes what goes through another one.

    Args:
        traffic: of the rank, from which bytes are read.
        exchanges: where they are noted, in the order of the calls.
    """

    def __init__(
        self, axis: str, group: Group, traffic: Traffic, timeline: StepTimeline, exchanges: list[ProfiledExchange]
    ) -> None:
        self.size, self.rank = group.size, group.rank
        self._axis, self._group, self._traffic = axis, group, traffic
        self._timeline, self._exchanges = timeline, exchanges
        self._before = self._sent()

    def all_reduce(self, tensor: torch.Tensor) -> Work:
        return self._begun("all_reduce", lambda: self._group.all_reduce(tensor))

    def all_gather(self, out: torch.Tensor, inp: torch.Tensor) -> Work:
        return self._begun("all_gather", lambda: self._group.all_gather(out, inp))

    def reduce_scatter(self, out: torch.Tensor, inp: torch.Tensor) -> Work:
        return self._begun("reduce_scatter", lambda: self._group.reduce_scatter(out, inp))

    def all_to_all(self, out: torch.Tensor, inp: torch.Tensor, splits: Splits | None = None) -> Work:
        if splits is None:  # a user's own transport may know equal chunks alone
            return self._begun("all_to_all", lambda: self._group.all_to_all(out, inp))
        return self._begun("all_to_all", lambda: self._group.all_to_all(out, inp, splits))

    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        return self._begun("broadcast", lambda: self._group.broadcast(tensor, source))

    def permute(self, out: torch.Tensor, inp: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> Work:
        return self._begun("permute", lambda: self._group.permute(out, inp, pairs))

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Work:
        return self._begun("send", lambda: self._group.send(tensor, peer, tag), peer, tag)

    def recv(self, out: torch.Tensor, peer: int, tag: int) -> Work:
        return self._begun("recv", lambda: self._group.recv(out, peer, tag), peer, tag)

    def all_gather_object(self, value: Any) -> list[Any]:
        values: list[Any] = []
        self._begun(
            "all_gather_object", lambda: Work(lambda: values.extend(self._group.all_gather_object(value)))
        ).wait()
        return values

    def _sent(self) -> tuple[int, int]:
        """Bytes of payload and of scalars that this rank has sent along the axis."""
        return self._traffic.payload.get(self._axis, 0), self._traffic.scalars.get(self._axis, 0)

    def _begun(self, op: str, start: Callable[[], Work], peer: int | None = None, tag: int = 0) -> Work:
        # All of this runs with caches full of tensors, so that each function it calls costs: context managers are too much.
        timeline, axis, name = self._timeline, self._axis, here().path
        # The caller has counted this exchange, and nothing else since the one before.
        (payload, scalars), (payload_before, scalars_before) = sent, _ = self._sent(), self._before
        self._before = sent
        made = ProfiledExchange(
            op, axis, name, payload - payload_before, scalars - scalars_before, peer, tag, time.perf_counter()
        )
        self._exchanges.append(made)
        place = timeline.open(Part("communication", axis, name))
        try:
            work = start()
        finally:
            timeline.close(place)

        def finish() -> None:
            began, place = time.perf_counter(), timeline.open(Part("wait", axis, name))
            try:
                work.wait()
            finally:
                timeline.close(place)
            made.end = time.perf_counter()
            made.waited = made.end - began

        return Work(finish)
