"""Exchanges of flat buffers as differentiable functions of values.

A buffer is the last dimension of a tensor, and the dimensions before it are those of `torch.func.vmap`: one message carries
all of them. Each exchange is one opaque operator, so that a graph has it as a node whose arguments say what is exchanged:
the number of a `AxisLink` stands for an axis of a mesh, which no graph can hold.

The types are those of `shardlib.collectives.pairs`: a gathered buffer is used differently by each rank, a sum is used alike.

    =========  =================  ==============
    forward    types              backward
    =========  =================  ==============
    gathered   V -> V             scattered
    scattered  V -> V             gathered
    summed     P -> I             shared
    shared     I -> R             summed
    =========  =================  ==============
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from shardlib.collectives import primitives
from shardlib.collectives.ops import LinearFunction
from shardlib.kernels.common.operators import opaque
from shardlib.mesh.mesh import Mesh
from shardlib.mesh.transport import Work
from shardlib.mesh.transport.activity import naming

_numbers = itertools.count()
_links: weakref.WeakValueDictionary[int, AxisLink] = weakref.WeakValueDictionary()
_registering = threading.Lock()  # simulated ranks are threads


class AxisLink:
    """An axis of a mesh, as flat buffers are exchanged along it.

    Attributes:
        label: what is exchanged, for reports.
        stays: whether what is gathered stays from forward to backward.
        tile: whether it is one of a leaf's tiles, which are whole one by one.
        number: stands for the link among an operator's arguments, as long as the link lives.
    """

    mesh: Mesh
    axis: str
    label: str
    stays: bool
    tile: bool

    def __init__(self, mesh: Mesh, axis: str, label: str, stays: bool = False, tile: bool = False) -> None:
        self.mesh, self.axis, self.label, self.stays, self.tile = mesh, axis, label, stays, tile
        with _registering:
            self.number: int = next(_numbers)
            _links[self.number] = self

    @property
    def ways(self) -> int:
        """The number of ranks along the axis."""
        return self.mesh.shape[self.axis]


class PendingExchange:
    """An exchange under way.

    Attributes:
        link: along which.
    """

    link: AxisLink

    def __init__(self, link: AxisLink, work: Work, out: torch.Tensor, kept: torch.Tensor, batch: Sequence[int]) -> None:
        self.link, self._work, self._out, self._kept, self._batch = link, work, out, kept, tuple(batch)

    def wait(self) -> torch.Tensor:
        """The result. Call it once."""
        self._work.wait()
        del self._kept
        if not self._batch or self._out.dim() == len(self._batch) + 1:
            return self._out if self._batch else self._out.view(-1)
        return self._out.movedim(0, -2).reshape(*self._batch, -1)  # of a gather


def start_gather(x: torch.Tensor, number: int) -> PendingExchange:
    """Start the exchange of `gathered`."""
    link, x = _links[number], x.contiguous()
    out = x.new_empty((link.ways, *x.shape))
    with naming(link.label):
        return PendingExchange(link, primitives.all_gather(link.mesh, link.axis, out, x), out, x, x.shape[:-1])


def start_scatter(x: torch.Tensor, number: int) -> PendingExchange:
    """Start the exchange of `scattered`."""
    link = _links[number]
    chunks = x.unflatten(-1, (link.ways, -1)).movedim(-2, 0).contiguous()
    out = torch.empty_like(chunks[0])
    with naming(link.label):
        return PendingExchange(
            link, primitives.reduce_scatter(link.mesh, link.axis, out, chunks), out, chunks, x.shape[:-1]
        )


def start_sum(x: torch.Tensor, number: int) -> PendingExchange:
    """Start the exchange of `summed`."""
    link, out = _links[number], x.clone(memory_format=torch.contiguous_format)
    with naming(link.label):
        return PendingExchange(link, primitives.all_reduce(link.mesh, link.axis, out), out, out, x.shape[:-1])


def _gather(x: torch.Tensor, link: int) -> list[torch.Tensor]:
    return [start_gather(x, link).wait()]


def _scatter(x: torch.Tensor, link: int) -> list[torch.Tensor]:
    return [start_scatter(x, link).wait()]


def _sum(x: torch.Tensor, link: int) -> list[torch.Tensor]:
    return [start_sum(x, link).wait()]


GATHER = opaque(
    "gather_buffer", _gather, lambda x, link: [x.new_empty((*x.shape[:-1], x.shape[-1] * _links[link].ways))]
)
SCATTER = opaque(
    "scatter_buffer", _scatter, lambda x, link: [x.new_empty((*x.shape[:-1], x.shape[-1] // _links[link].ways))]
)
SUM = opaque("sum_buffer", _sum, lambda x, link: [torch.empty_like(x, memory_format=torch.contiguous_format)])

# How to start each operator's exchange, for a graph that computes while it is under way.
STARTS = {GATHER: start_gather, SCATTER: start_scatter, SUM: start_sum}


def link_of(number: int) -> AxisLink:
    """The link of a number among an operator's arguments."""
    return _links[number]


class _LinearExchange(LinearFunction):
    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.static = inputs[1:]
        ctx.alive = link_of(inputs[1])  # a backward may come when nobody else has the link any more


class _Gathered(_LinearExchange):
    @staticmethod
    def forward(x: torch.Tensor, link: int) -> torch.Tensor:
        return GATHER(x, link)[0]


class _Scattered(_LinearExchange):
    @staticmethod
    def forward(x: torch.Tensor, link: int) -> torch.Tensor:
        return SCATTER(x, link)[0]


class _Summed(_LinearExchange):
    @staticmethod
    def forward(x: torch.Tensor, link: int) -> torch.Tensor:
        return SUM(x, link)[0]


class _Shared(_LinearExchange):
    @staticmethod
    def forward(x: torch.Tensor, link: int) -> torch.Tensor:
        return x.view_as(x)


_Gathered.dual, _Scattered.dual = _Scattered, _Gathered
_Summed.dual, _Shared.dual = _Shared, _Summed


def gathered(x: torch.Tensor, link: AxisLink) -> torch.Tensor:
    """The ranks' buffers one after the other: ``[..., n]`` to ``[..., ways * n]``."""
    return _Gathered.apply(x, link.number)


def scattered(x: torch.Tensor, link: AxisLink) -> torch.Tensor:
    """This rank's chunk of the sum of the ranks' buffers: ``[..., ways * n]`` to ``[..., n]``."""
    return _Scattered.apply(x, link.number)


def summed(x: torch.Tensor, link: AxisLink) -> torch.Tensor:
    """The sum of the ranks' buffers, from which all ranks then compute the same."""
    return _Summed.apply(x, link.number)


def shared(x: torch.Tensor, link: AxisLink) -> torch.Tensor:
    """``x``, which is equal on all ranks, for each to compute something else from: the dual of `summed`."""
    return _Shared.apply(x, link.number)
