"""Routes of rows, hop by hop, and their transfers to the experts (dispatch) and back (combine), which autograd crosses.

Experts are sharded over the axes a_1 … a_m in equal runs, the first axis major. A rank's rows are sorted by expert, so they
are blocks of a table of sizes ``[n_1, …, n_m, experts of a rank]`` in row-major order. Hop k sends the k-th index of the
owner along axis a_k, and what arrives has the source's index in its place. Before it the blocks are put in such an order
that this index comes first. After the last hop they lie by expert, and then by source rank.

A dispatch and a combine along one route are each other's transpose: one permutes rows over all ranks, and the other inverts
it. So the backward of either is the other, with gradients in place of rows. It too starts where the forward was waited for,
and is waited for where the forward started, so that what was computed meanwhile is differentiated meanwhile. The pair takes
part in backward on every rank where its rows or the route's anchor need a gradient, be there rows or none.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from shardlib.collectives import ops
from shardlib.collectives.codecs.base import Packing, packed, unpacked
from shardlib.common._compat import read_sum, require, require_async
from shardlib.common.environment import once
from shardlib.errors import LossError, SpecError
from shardlib.kernels.permute import permute, unpermute
from shardlib.mesh.mesh import Mesh


@dataclass(frozen=True)
class RowPermutation:
    """A permutation of rows.

    Attributes:
        there: int64: the number of the row that comes to each place.
        back: the inverse permutation.
    """

    there: torch.Tensor
    back: torch.Tensor


@dataclass(frozen=True)
class Hop:
    """An all-to-all along one axis, and the order in which a rank goes on with what arrives.

    Attributes:
        sizes: rows to each rank of the axis, and from each, int64 in host memory. None if they are equally many.
        sent, received: rows to all of them, and from all.
        order: of the rows that have arrived; None keeps theirs.
    """

    axis: str
    sizes: tuple[torch.Tensor, torch.Tensor] | None
    sent: int
    received: int
    order: RowPermutation | None

    def ordered(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows that have arrived, in the order in which they go on."""
        return rows if self.order is None else rows.index_select(0, self.order.there)

    def undone(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows in the order in which they had arrived: the inverse of `ordered`."""
        return rows if self.order is None else rows.index_select(0, self.order.back)


@dataclass(frozen=True)
class Route:
    """The route of one rank's rows to their experts, and back.

    Attributes:
        rows: of this rank, on which no expert has computed yet.
        hops: from the rank of the tokens to that of the experts.
        places: where rows are padded, ``[rows, 1]``: the place of each row among those that leave, −1 for a row that stays.
            Else None: the first rows leave, and the others stay.
        ends: int64 ``[experts of a rank]``: among the rows that have arrived, the row after each expert's last one.
        slots: the rows that every expert gets from every rank, where they are padded to one number; else None.
        anchor: a tensor that needs a gradient wherever backward must exchange gradients; or None.
    """

    rows: int
    hops: tuple[Hop, ...]
    places: torch.Tensor | None
    ends: torch.Tensor
    slots: int | None = None
    anchor: torch.Tensor | None = None

    @property
    def leaving(self) -> int:
        """The number of rows that leave, padding included."""
        return self.hops[0].sent

    @property
    def arriving(self) -> int:
        """The number of rows that arrive, padding included."""
        return self.hops[-1].received

    def enter(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows that leave, of all rows of this rank. Padding is 0."""
        if self.places is None:
            return rows[: self.leaving]
        return permute(rows, self.places, self.leaving)

    def leave(self, rows: torch.Tensor) -> torch.Tensor:
        """All rows of this rank, from those that have come back. A row that stayed is 0."""
        if self.places is None:
            return torch.cat([rows, rows.new_zeros(self.rows - self.leaving, *rows.shape[1:])])
        return unpermute(rows, self.places)


Tables = list[tuple[torch.Tensor, torch.Tensor]]  # of each hop, the sizes of the blocks that leave and that arrive


def exchanged(mesh: Mesh, axes: Sequence[str], counts: torch.Tensor) -> Tables:
    """The tables of a route on which every expert gets as many of a rank's rows as its ``counts`` ``[E]`` says.

    Ranks exchange them once: where a block is recomputed, its rows are sent by the tables of its first run.
    """
    flat = once(lambda: _exchange(mesh, axes, counts))
    return list(zip(flat[::2], flat[1::2], strict=True))


def _exchange(mesh: Mesh, axes: Sequence[str], counts: torch.Tensor) -> list[torch.Tensor]:
    table, tables = _table(mesh, axes, counts), []
    what = "the counts of rows for experts (parameters that are gathered before them are the same on all ranks)"
    for axis, dims in zip(axes, _turns(len(axes)), strict=True):
        arrived = ops.all_to_all.start(table, mesh, axis, about=what)()
        tables += [table, arrived]
        table = arrived.permute(dims)
    return tables


def uneven(axes: Sequence[str], rows: int, tables: Tables, anchor: torch.Tensor | None) -> Route:
    """The route of ``rows`` rows whose sizes ranks have exchanged. The host waits for them, once for all hops.

    In a trace numbers of rows are known in a run alone, and taken to be ``rows`` where bytes are told.

    Raises:
        SpecError: more rows are counted than there are.
    """
    both = [table.flatten(1).sum(1) for pair in tables for table in pair]
    sizes = torch.cat(both).cpu().split([len(each) for each in both])
    here, hops = read_sum(sizes[0], rows), []  # rows on this rank, before each hop
    require(here <= rows, lambda: SpecError(f"{here} rows are counted and {rows} given: count the rows that are kept"))
    for k, (axis, dims, (_, arrived)) in enumerate(zip(axes, _turns(len(axes)), tables, strict=True)):
        coming = read_sum(sizes[2 * k + 1], rows)
        hops.append(Hop(axis, (sizes[2 * k], sizes[2 * k + 1]), here, coming, _order(arrived, dims, coming)))
        here = coming
    return Route(rows, tuple(hops), None, _ends(arrived), anchor=anchor)


def even(
    mesh: Mesh, axes: Sequence[str], rows: int, counts: torch.Tensor, slots: int, anchor: torch.Tensor | None
) -> Route:
    """The route of ``rows`` rows on which every expert gets ``slots`` from every rank: after its ``counts``, of zeros.

    All sizes are known, and the host waits for nothing.
    """
    table, leaving = _table(mesh, axes, torch.full_like(counts, slots)), len(counts) * slots
    hops = []
    for axis, dims in zip(axes, _turns(len(axes)), strict=True):
        hops.append(Hop(axis, None, leaving, leaving, _order(table, dims, leaving)))
        arrived, table = table, table.permute(dims)
    return Route(rows, tuple(hops), _places(rows, counts, slots), _ends(arrived), slots, anchor)


def _table(mesh: Mesh, axes: Sequence[str], counts: torch.Tensor) -> torch.Tensor:
    """The sizes of all blocks, by owner and by expert of the owner."""
    ways = [mesh.shape[axis] for axis in axes]
    return counts.view(*ways, len(counts) // math.prod(ways))


def _turns(hops: int) -> list[tuple[int, ...]]:
    """After each hop, the dimensions of the table of blocks that have arrived, in their new order.

    After hop k of m, counted from 0, they are the sources along axes k, …, 0, the owners along axes k + 1, …, m − 1, and the
    owner's experts.
    """
    onwards = [(k + 1, *range(k + 1), *range(k + 2, hops + 1)) for k in range(hops - 1)]
    return [*onwards, tuple(reversed(range(hops + 1)))]


def _order(table: torch.Tensor, dims: tuple[int, ...], rows: int) -> RowPermutation | None:
    """The order of ``rows`` rows in blocks of the sizes in ``table`` when its dimensions are put in another order."""
    long = [dim for dim in dims if table.shape[dim] > 1]
    if long == sorted(long):
        return None
    ends = table.flatten().cumsum(0).view(table.shape)
    sizes, starts = table.permute(dims).flatten(), (ends - table).permute(dims).flatten()
    shifts = starts - (sizes.cumsum(0) - sizes)
    numbers = torch.arange(rows, device=table.device)
    there = numbers + shifts.repeat_interleave(sizes, output_size=rows)
    return RowPermutation(there, torch.empty_like(there).scatter(0, there, numbers))


def _places(rows: int, counts: torch.Tensor, slots: int) -> torch.Tensor:
    """``[rows, 1]``: the place of each row among the slots of all experts; −1 for a row that is not counted."""
    require_async((counts <= slots).all(), f"an expert keeps more rows than its {slots} slots: pass its capacity")
    ends, numbers = counts.cumsum(0), torch.arange(rows, device=counts.device)
    owners = torch.searchsorted(ends, numbers, right=True)
    places = owners * slots + numbers - F.pad(ends, (1, 0))[owners]
    return places.where(owners < len(counts), -1)[:, None]


def _ends(arrived: torch.Tensor) -> torch.Tensor:
    """The row after each expert's last one, from the sizes of the blocks that arrive on the last hop."""
    return arrived.flatten(0, -2).sum(0).cumsum(0)


Packings = tuple[Packing | None, Packing | None]


class RowTransfer:
    """The dispatch of one rank's rows along a route, or the combine. `start` starts it, and `finish` ends it.

    The hop along the first axis is under way between the two; those along other axes are waited for.

    Args:
        dispatches: whether to the experts; else back.
        packings: how rows are encoded in a dispatch, and in a combine; None sends them as they are.
        about: what is sent, for reports.

    Attributes:
        samples: how many samples lie side by side in a row, where `torch.func.vmap` sends several at once.
        dual: the transfer of the gradients, while backward runs.
        tangents: the transfer of the rows' tangents, in forward mode.
    """

    route: Route

    def __init__(self, mesh: Mesh, route: Route, dispatches: bool, packings: Packings, about: str) -> None:
        self._mesh, self.route, self._dispatches, self._packings, self._about = mesh, route, dispatches, packings, about
        self._packing = packings[0] if dispatches else packings[1]
        self.samples = 1
        self.dual: RowTransfer | None = None
        self.tangents: RowTransfer | None = None

    def of_gradients(self) -> RowTransfer:
        return RowTransfer(self._mesh, self.route, not self._dispatches, self._packings, f"gradients of {self._about}")

    def of_tangents(self) -> RowTransfer:
        """The transfer of tangents.

        Raises:
            LossError: in a trace that does not know how many rows there are: torch must know whether tangents are empty.
        """
        if not isinstance(self.route.arriving, int):
            raise LossError(
                f"tangents of {self._about} in a traced function, where their number is unknown. Pad rows, "
                "sl.experts(padded=True)"
            )
        return RowTransfer(self._mesh, self.route, self._dispatches, self._packings, f"tangents of {self._about}")

    def start(self, rows: torch.Tensor) -> None:
        """Start with these rows."""
        first, *others = self.route.hops
        rows = self._encoded(self.route.enter(rows) if self._dispatches else rows)
        if self._dispatches:
            self._send(first, rows)
            return
        for hop in reversed(others):
            rows = self._sent(hop, hop.undone(rows))
        self._send(first, first.undone(rows))

    def finish(self) -> torch.Tensor:
        """The rows at the end."""
        first, *others = self.route.hops
        rows = self._landed()
        if self._dispatches:
            rows = first.ordered(rows)
            for hop in others:
                rows = hop.ordered(self._sent(hop, rows))
        rows = self._decoded(rows)
        return rows if self._dispatches else self.route.leave(rows)

    def _encoded(self, rows: torch.Tensor) -> torch.Tensor:
        """What is sent of rows: a message for each, which hops hand on as it is."""
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
        sizes, arriving = (sizes, hop.received) if self._dispatches else (sizes[::-1], hop.sent)
        if not sizes:  # equal chunks on all ranks: where they are not, a transport says so, with sizes
            about += f", {self.route.slots} for each expert (padded=True: equally many on all ranks)"
        self._wait = ops.all_to_all.start(rows, self._mesh, hop.axis, arriving, sizes=sizes, about=about)

    def _landed(self) -> torch.Tensor:
        rows = self._wait()
        del self._wait
        return rows


class PendingTransfer:
    """The handle of a transfer: see `shardlib.collectives.tokens.base.PendingRows`."""

    def __init__(self, rows: torch.Tensor, transfer: RowTransfer) -> None:
        self._token = _Start.apply(rows, transfer.route.anchor, transfer)
        self._transfer = transfer
        self._rows: torch.Tensor | None = None

    def wait(self) -> torch.Tensor:
        if self._rows is None:
            self._rows = _Finish.apply(self._token, self._transfer)
        return self._rows


class _Half(torch.autograd.Function):
    """A Function whose forward has no ctx, as torch.func requires. The last argument is the transfer.

    The rows of samples that `torch.func.vmap` takes together are sent side by side, as wider rows.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.forward.__signature__ = inspect.signature(cls.forward)  # type: ignore[attr-defined]  # else apply derives it in every call

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.transfer = inputs[-1]


class _Start(_Half):
    """Rows to a token that stands for them while they are under way, in backward as in forward."""

    @staticmethod
    def forward(rows: torch.Tensor, anchor: torch.Tensor | None, transfer: RowTransfer) -> torch.Tensor:
        transfer.start(rows)
        return rows.new_zeros(())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        dual, ctx.transfer.dual = ctx.transfer.dual, None
        return _Finish.apply(grad, dual), None, None

    @staticmethod
    def jvp(ctx: Any, rows: torch.Tensor, *_: Any) -> torch.Tensor:
        ctx.transfer.tangents = tangents = ctx.transfer.of_tangents()
        return _Start.apply(rows, None, tangents)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], rows: torch.Tensor, anchor: Any, transfer: RowTransfer
    ) -> tuple[Any, Any]:
        if in_dims[0] is None:  # of the anchor nothing is sent
            return _Start.apply(rows, anchor, transfer), None
        transfer.samples *= info.batch_size
        token = _Start.apply(rows.movedim(in_dims[0], 1).flatten(1), anchor, transfer)
        return token.expand(info.batch_size), 0


class _Finish(_Half):
    @staticmethod
    def forward(token: torch.Tensor, transfer: RowTransfer) -> torch.Tensor:
        return transfer.finish()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        ctx.transfer.dual = dual = ctx.transfer.of_gradients()
        return _Start.apply(grad, None, dual), None

    @staticmethod
    def jvp(ctx: Any, token: torch.Tensor, _: Any) -> torch.Tensor:
        tangents, ctx.transfer.tangents = ctx.transfer.tangents, None
        return _Finish.apply(token, tangents)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], token: torch.Tensor, transfer: RowTransfer
    ) -> tuple[torch.Tensor, int]:
        rows = _Finish.apply(token.select(in_dims[0], 0), transfer)
        return rows.unflatten(1, (info.batch_size, -1)), 1
