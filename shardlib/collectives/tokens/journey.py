"""Journeys of rows along a route, to their experts or back, which autograd crosses.

A journey to the experts and one back along the same route are each other's transpose: one permutes rows over all ranks, and
the other inverts it. So the backward of either is the other, with gradients in place of rows. It too starts where the forward
was waited for, and is waited for where the forward started, so that what was computed meanwhile is differentiated meanwhile.

The pair takes part in backward on every rank where its rows or the route's anchor need a gradient, be there rows or none.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from shardlib.collectives import ops
from shardlib.collectives.codecs.integers import Packing, packed, unpacked
from shardlib.collectives.tokens.route import Hop, Route
from shardlib.errors import LossError
from shardlib.mesh.mesh import Mesh

Packings = tuple[Packing | None, Packing | None]


class Journey:
    """One journey of one rank's rows. `depart` starts it, and `arrive` ends it.

    The hop along the first axis is under way between the two; those along other axes are waited for.

    Args:
        outward: whether to the experts; else back.
        packings: how rows are encoded on the way to the experts, and on the way back; None sends them as they are.
        about: what travels, for reports.

    Attributes:
        samples: how many samples lie side by side in a row, where `torch.func.vmap` sends several at once.
    """

    def __init__(self, mesh: Mesh, route: Route, outward: bool, packings: Packings, about: str) -> None:
        self._mesh, self.route, self._outward, self._packings, self._about = mesh, route, outward, packings, about
        self._packing = packings[0] if outward else packings[1]
        self.samples = 1
        self.dual: Journey | None = None  # the journey of the gradients, while backward runs
        self.twin: Journey | None = None  # the journey of the rows' tangents, in forward mode

    def reversed(self) -> Journey:
        """The journey of the gradients."""
        return Journey(self._mesh, self.route, not self._outward, self._packings, f"gradients of {self._about}")

    def again(self) -> Journey:
        """The journey of tangents.

        Raises:
            LossError: in a trace that does not know how many rows there are: torch must know whether tangents are empty.
        """
        if not isinstance(self.route.arriving, int):
            raise LossError(
                f"tangents of {self._about} in a traced function: how many rows travel is known only in a run. Pad rows to a "
                "number of slots, sl.experts(padded=True)"
            )
        return Journey(self._mesh, self.route, self._outward, self._packings, f"tangents of {self._about}")

    def depart(self, rows: torch.Tensor) -> None:
        """Start with these rows."""
        first, *others = self.route.hops
        rows = self._encoded(self.route.enter(rows) if self._outward else rows)
        if self._outward:
            self._send(first, rows)
            return
        for hop in reversed(others):
            rows = self._sent(hop, hop.undone(rows))
        self._send(first, first.undone(rows))

    def arrive(self) -> torch.Tensor:
        """The rows at the end."""
        first, *others = self.route.hops
        rows = self._landed()
        if self._outward:
            rows = first.ordered(rows)
            for hop in others:
                rows = hop.ordered(self._sent(hop, rows))
        rows = self._decoded(rows)
        return rows if self._outward else self.route.leave(rows)

    def _encoded(self, rows: torch.Tensor) -> torch.Tensor:
        """What travels of rows: a message for each, which hops hand on as it is."""
        self._width, self._dtype = rows.shape[1] // self.samples, rows.dtype
        if self._packing is None:
            return rows.contiguous()
        return packed(rows.unflatten(1, (self.samples, self._width)), self._packing).flatten(1)

    def _decoded(self, messages: torch.Tensor) -> torch.Tensor:
        if self._packing is None:
            return messages
        messages = messages.unflatten(1, (self.samples, self._packing.size(self._width)))
        return unpacked(messages, self._packing, self._width, self._dtype).flatten(1)

    def _sent(self, hop: Hop, rows: torch.Tensor) -> torch.Tensor:
        self._send(hop, rows)
        return self._landed()

    def _send(self, hop: Hop, rows: torch.Tensor) -> None:
        """Start a hop, forwards or backwards."""
        about, sizes = self._about, hop.sizes or ()
        sizes, arriving = (sizes, hop.received) if self._outward else (sizes[::-1], hop.sent)
        if not sizes:  # equal chunks on all ranks: where they are not, a transport says so, with sizes
            about += f", {self.route.slots} for each expert (padded=True: equally many on all ranks)"
        self._wait = ops.all_to_all.start(rows, self._mesh, hop.axis, arriving, sizes=sizes, about=about)

    def _landed(self) -> torch.Tensor:
        rows = self._wait()
        del self._wait
        return rows


class Travelling:
    """Rows on a journey: see `shardlib.collectives.tokens.base.Coming`."""

    def __init__(self, rows: torch.Tensor, journey: Journey) -> None:
        self._standing = _Depart.apply(rows, journey.route.anchor, journey)
        self._journey = journey
        self._rows: torch.Tensor | None = None

    def wait(self) -> torch.Tensor:
        if self._rows is None:
            self._rows = _Arrive.apply(self._standing, self._journey)
        return self._rows


class _Half(torch.autograd.Function):
    """A Function whose forward has no ctx, as torch.func requires. The last argument is the journey.

    The rows of samples that `torch.func.vmap` takes together travel side by side, as wider rows.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.forward.__signature__ = inspect.signature(cls.forward)  # type: ignore[attr-defined]  # else apply derives it in every call

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.journey = inputs[-1]


class _Depart(_Half):
    """Rows to a number that stands for them on their way, in backward as in forward."""

    @staticmethod
    def forward(rows: torch.Tensor, anchor: torch.Tensor | None, journey: Journey) -> torch.Tensor:
        journey.depart(rows)
        return rows.new_zeros(())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        dual, ctx.journey.dual = ctx.journey.dual, None
        return _Arrive.apply(grad, dual), None, None

    @staticmethod
    def jvp(ctx: Any, rows: torch.Tensor, *_: Any) -> torch.Tensor:
        ctx.journey.twin = twin = ctx.journey.again()
        return _Depart.apply(rows, None, twin)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], rows: torch.Tensor, anchor: Any, journey: Journey) -> tuple[Any, Any]:
        if in_dims[0] is None:  # of the anchor nothing travels
            return _Depart.apply(rows, anchor, journey), None
        journey.samples *= info.batch_size
        standing = _Depart.apply(rows.movedim(in_dims[0], 1).flatten(1), anchor, journey)
        return standing.expand(info.batch_size), 0


class _Arrive(_Half):
    @staticmethod
    def forward(standing: torch.Tensor, journey: Journey) -> torch.Tensor:
        return journey.arrive()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        ctx.journey.dual = dual = ctx.journey.reversed()
        return _Depart.apply(grad, None, dual), None

    @staticmethod
    def jvp(ctx: Any, standing: torch.Tensor, _: Any) -> torch.Tensor:
        twin, ctx.journey.twin = ctx.journey.twin, None
        return _Arrive.apply(standing, twin)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], standing: torch.Tensor, journey: Journey) -> tuple[torch.Tensor, int]:
        rows = _Arrive.apply(standing.select(in_dims[0], 0), journey)
        return rows.unflatten(1, (info.batch_size, -1)), 1
