"""Token exchanges of one all-to-all along each of their axes, and what they send."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from shardlib.collectives.codecs import FORMS, packing_of
from shardlib.collectives.codecs.base import Packing
from shardlib.collectives.tokens.base import Payload, TokenExchange
from shardlib.collectives.tokens.routing import (
    Packings,
    PendingTransfer,
    Route,
    RowTransfer,
    even,
    exchanged,
    uneven,
)
from shardlib.common._compat import can_read_numbers, of_func, traced, without_derivatives, without_func
from shardlib.errors import LossError, SpecError
from shardlib.mesh.mesh import Mesh


@dataclass(frozen=True, kw_only=True)
class AllToAllExchange(TokenExchange):
    """A token exchange of one all-to-all along each axis in turn; in the combine they run in reverse.

    Attributes:
        codec: how rows are encoded on the way to the experts: "int8", "int4" or "fp8", with an fp32 scale for every 128
            elements of a row; a `shardlib.collectives.codecs.Packing`; or None, not at all. In backward the gradients of
            results go this way, and are encoded too. A row is encoded once, by itself: what arrives does not depend on how
            other rows are routed. Rounding counts as the identity in gradients.
        back_codec: the same on the way back: results in forward, gradients of rows in backward. These are what a token's
            output and gradient are made of, and DeepSeek-V3 (arXiv 2412.19437, section 3.3.3), which sends fp8 to its
            experts, leaves them in 16 bits.
    """

    codec: str | Packing | None = None
    back_codec: str | Packing | None = None

    def __post_init__(self) -> None:
        for name in ("codec", "back_codec"):
            codec = getattr(self, name)
            if not (codec is None or hasattr(codec, "pack") or (isinstance(codec, str) and codec in FORMS)):
                raise SpecError(f"{self.name}({name}={codec!r}): use a packing, or {', '.join(map(repr, FORMS))}")

    def __str__(self) -> str:
        ways = ("to experts", self.codec), ("back", self.back_codec)
        coded = [f", {way} in {codec}" for way, codec in ways if codec is not None]
        padded = ", padded" * self.padded
        spare = f", {self.spare} spare slot{'s' * (self.spare > 1)} on a rank" * (self.spare > 0)
        return f"{self.name} over {' and '.join(f'axis {axis!r}' for axis in self.axes)}{''.join(coded)}{padded}{spare}"

    def send(
        self,
        mesh: Mesh,
        rows: torch.Tensor,
        counts: torch.Tensor,
        *,
        slots: int | None = None,
        anchor: torch.Tensor | None = None,
    ) -> tuple[PendingTransfer, Route]:
        self._check(mesh, rows, counts)
        if anchor is None and torch.is_grad_enabled():
            anchor = rows.new_zeros((), requires_grad=True)
        counts, number = self._known(counts, mesh, slots), rows.shape[0]
        with without_func():  # a route has no derivatives
            tables = exchanged(mesh, self.axes, counts) if slots is None else None
            if tables is not None and not mesh.abstract:
                route = uneven(self.axes, number, tables, anchor)
            else:  # a plan's trace knows no counts, and takes them to be equal
                slots = -(-number // len(counts)) if slots is None else slots
                route = even(mesh, self.axes, number, counts, slots, anchor)
        return PendingTransfer(rows, RowTransfer(mesh, route, True, self._packings, "tokens to experts")), route

    def back(self, mesh: Mesh, rows: torch.Tensor, way: Route) -> PendingTransfer:
        if rows.dim() != 2 or rows.shape[0] != way.arriving:
            raise SpecError(f"{self}: results are {tuple(rows.shape)} for {way.arriving} rows; pass one for each")
        return PendingTransfer(rows, RowTransfer(mesh, way, False, self._packings, "tokens back from experts"))

    def payload(
        self,
        sizes: Mapping[str, int],
        coords: Mapping[str, int],
        counts: torch.Tensor,
        width: int,
        dtype: torch.dtype,
        *,
        slots: int | None = None,
    ) -> Payload:
        ways, place = ([of[axis] for axis in self.axes] for of in (sizes, coords))
        given = counts if slots is None else torch.full_like(counts, slots)
        rows = rows_sent(ways, place, given)
        return self._in_bytes(sizes, rows, 0 if slots is not None else counts.shape[1], width, dtype)

    def bound(
        self,
        sizes: Mapping[str, int],
        rows: int,
        experts: int,
        width: int,
        dtype: torch.dtype,
        *,
        slots: int | None = None,
    ) -> Payload:
        ways = [sizes[axis] for axis in self.axes]
        if slots is not None:  # every rank sends the same
            padded = torch.full((math.prod(ways), experts), slots)
            return self._in_bytes(sizes, rows_sent(ways, [0] * len(ways), padded), 0, width, dtype)
        return self._in_bytes(sizes, most_rows_sent(ways, rows), experts, width, dtype)

    def _in_bytes(
        self, sizes: Mapping[str, int], rows: tuple[list[int], list[int]], counts: int, width: int, dtype: torch.dtype
    ) -> Payload:
        """The payload of ``rows`` to the experts and back on each hop, and of messages of ``counts`` counts."""
        told = {axis: counts * torch.int64.itemsize * (sizes[axis] - 1) // sizes[axis] for axis in self.axes}
        there, back = (
            {axis: number * bytes_of_row for axis, number in zip(self.axes, numbers, strict=True)}
            for numbers, packing in zip(rows, self._packings, strict=True)
            for bytes_of_row in [width * dtype.itemsize if packing is None else packing.size(width)]
        )
        return Payload(told, there, back)

    @property
    def _packings(self) -> Packings:
        """The encodings on the way to the experts, and back."""
        return packing_of(self.codec), packing_of(self.back_codec)

    def _known(self, counts: torch.Tensor, mesh: Mesh, slots: int | None) -> torch.Tensor:
        """``counts``, which have no derivatives. Raises `LossError` where the sizes of messages cannot be known."""
        counts = without_derivatives(counts)
        if of_func(counts):
            raise LossError(
                f"{self} inside of torch.func.vmap, where counts differ by sample. Route outside of vmap, or loop "
                "over the samples"
            )
        if slots is None and traced(counts) and not mesh.abstract and not can_read_numbers(counts):
            raise LossError(
                f"{self} in a traced function, where counts are unknown. Pad rows, sl.experts(padded=True), or use "
                "tracing_mode='fake'"
            )
        return counts

    def _check(self, mesh: Mesh, rows: torch.Tensor, counts: torch.Tensor) -> None:
        if rows.dim() != 2 or counts.dim() != 1 or counts.dtype is not torch.int64:
            raise SpecError(
                f"{self}: rows are {tuple(rows.shape)} and counts {tuple(counts.shape)} of {counts.dtype}; pass [R, W], and "
                "[experts] of int64"
            )
        narrow = [packing for packing in self._packings if packing is not None and not packing.wide]
        if narrow and rows.dtype is torch.float64:
            raise SpecError(f"{self}: rows are float64, and {narrow[0]} holds fp32 at most; cast them, or use no codec")
        ranks = math.prod(mesh.shape[axis] for axis in self.axes)
        if len(counts) % ranks:
            raise SpecError(f"{self}: {len(counts)} experts do not divide over {ranks} ranks; use a multiple of them")


@dataclass(frozen=True)
class Direct(AllToAllExchange):
    """A token exchange by one all-to-all, in which every rank sends to every other (GShard, arXiv 2006.16668, section 3.2).

    Payload per rank: in each direction the rows that other ranks' experts have; see `TokenExchange.payload`.

    >>> def turned(mesh):  # two experts, one on each rank; rank r has the rows 10·r for expert 0 and 10·r + 1 for expert 1
    ...     rows = torch.tensor([[0.0], [1.0]]) + 10 * mesh.rank
    ...     exchange = sl.collectives.tokens.Direct("expert")
    ...     coming, way = exchange.send(mesh, rows, torch.tensor([1, 1]))
    ...     here = coming.wait()
    ...     return here.flatten().tolist(), exchange.back(mesh, -here, way).wait().flatten().tolist()
    >>> sl.simulate(turned, mesh=dict(expert=2))
    [([0.0, 10.0], [-0.0, -1.0]), ([1.0, 11.0], [-10.0, -11.0])]
    """

    name: ClassVar[str] = "direct"

    axis: str

    @property
    def axes(self) -> tuple[str, ...]:
        return (self.axis,)


@dataclass(frozen=True)
class TwoHops(AllToAllExchange):
    """A token exchange by all-to-alls between nodes and inside each node (DeepSpeed-MoE, arXiv 2201.05596, section 5.2).

    With N nodes of L ranks a rank sends N − 1 messages between nodes, each L times as large as the N·L − L of `Direct`: to
    the rank with its own local index on every other node, which passes on what others of its node are to have. Bytes between
    nodes are the same.

    Rows go between nodes first, and results inside the node first. In the other order messages would be as many and as
    large, but a rank would send between nodes what all ranks of its node have for one local index; so it sends its own rows,
    R at most, however lopsided the routing is. Of the two hops the one between nodes is under way while a rank computes.
    """

    name: ClassVar[str] = "two hops"

    node: str
    local: str

    @property
    def axes(self) -> tuple[str, ...]:
        return (self.node, self.local)


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
