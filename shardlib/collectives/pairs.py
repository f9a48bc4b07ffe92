"""Collectives that autograd crosses, each with its dual.

Along an axis, a tensor is Replicated (values are equal; ranks use them differently, so cotangents differ and must be
summed), Varying (values and cotangents differ), Partial (the true value is the sum over ranks) or Invariant (values and
cotangents are equal). Duals: R↔P, V↔V, I↔I. Hence

    ====================  ==========  ======================
    forward               types       backward
    ====================  ==========  ======================
    all_reduce "varying"  V -> V      all_reduce "varying"
    all_reduce "invariant" P -> I     identity
    copy                  I -> R      all_reduce
    all_gather "varying"  V -> V      reduce_scatter
    all_gather "invariant" V -> I     split
    split                 I -> V      all_gather "invariant"
    reduce_scatter        V -> V      all_gather
    all_to_all            V -> V      all_to_all, dims swapped
    permute               V -> V      permute, pairs reversed
    broadcast             V -> V      sum to the source
    ====================  ==========  ======================

The loss of a train step is the mean of the ranks' losses, so along the axes of the batch nothing is Invariant: there "copy",
"split" and "invariant" are refused for what has a gradient.

Every backward applies a Function of this table, a tangent is exchanged as its tensor is, and a batch of tensors in one
exchange. So the pairs are right under `torch.autograd.grad`, double backward, forward mode and `torch.func`, in any nesting.
(The types are those of meta-pytorch/spmd_types.)
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Literal

import torch

from shardlib.collectives import ops
from shardlib.collectives.ops import LinearFunction, Place, mesh_of, place_of, ranks
from shardlib.common._compat import constant_in_graphs, differentiated, whole_in_graphs
from shardlib.common.environment import environment
from shardlib.errors import LossError, SpecError
from shardlib.mesh.mesh import Mesh

Pairs = tuple[tuple[int, int], ...]

_DST = ("varying", "invariant")


def all_reduce(
    x: torch.Tensor, axis: str, *, dst: Literal["varying", "invariant"], mesh: Mesh | None = None
) -> torch.Tensor:
    """Sum ``x`` over ``axis``; every rank gets the sum.

    ::

        rank 0: a ┐            ┌ a+b
        rank 1: b ┘ all_reduce └ a+b

    Args:
        dst: how ranks use the sum. ``"invariant"``: every rank computes the same from it (one common loss), so the cotangent
            passes through. ``"varying"``: ranks compute different things (one loss per rank), so cotangents are summed
            over the axis.
        mesh: the mesh; by default that of the surrounding train step, `launch` or `simulate`.

    Raises:
        ValueError: another ``dst``.
        MeshError: no mesh, or a mesh without this axis.
        LossError: "invariant" along an axis of the batch, in a train step, whose loss is the mean of the ranks'.

    >>> total = lambda mesh: sl.collectives.all_reduce(torch.tensor(mesh.rank + 1.0), "data", dst="invariant")
    >>> sl.simulate(total, mesh=dict(data=2))
    [tensor(3.), tensor(3.)]
    """
    if dst not in _DST:
        raise ValueError(f"dst={dst!r}: pass 'invariant' (one common loss follows) or 'varying' (one loss per rank)")
    place = place_of(mesh, axis)
    if dst == "invariant":
        _require_one_loss(x, place, axis, 'all_reduce(dst="invariant")', _VARYING)
    function = _SumInvariant if dst == "invariant" else _SumVarying
    return function.apply(x, place, axis)


def copy(x: torch.Tensor, axis: str, *, mesh: Mesh | None = None) -> torch.Tensor:
    """``x``, which is equal on every rank, for ranks to compute different things from; backward sums their cotangents.

    The input of a column-sliced layer (Megatron-LM's f, arXiv 1909.08053; its g is `all_reduce` "invariant").

    >>> sl.simulate(lambda mesh: sl.collectives.copy(torch.tensor(1.0), "model"), mesh=dict(model=2))
    [tensor(1.), tensor(1.)]
    """
    place = place_of(mesh, axis)
    _require_one_loss(x, place, axis, "copy", "Use the tensor itself: the step sums its gradient over this axis")
    return _Copy.apply(x, place, axis)


def split(x: torch.Tensor, axis: str, *, dim: int = 0, mesh: Mesh | None = None) -> torch.Tensor:
    """This rank's chunk along ``dim`` of an ``x`` that is equal on every rank; backward gathers the cotangents.

    Raises:
        SpecError: the dimension's size is not divisible by the axis.

    >>> sl.simulate(lambda mesh: sl.collectives.split(torch.arange(4), "model"), mesh=dict(model=2))
    [tensor([0, 1]), tensor([2, 3])]
    """
    place = place_of(mesh, axis)
    _require_one_loss(
        x, place, axis, "split", "Use x.chunk(ranks, dim)[rank]: the step sums its gradient over this axis"
    )
    _divisible(x, _dim(x, dim), place, axis, "split")
    return _Split.apply(x, place, axis, _dim(x, dim))


def all_gather(
    x: torch.Tensor,
    axis: str,
    *,
    dim: int = 0,
    dst: Literal["varying", "invariant"] = "varying",
    mesh: Mesh | None = None,
) -> torch.Tensor:
    """Concatenate every rank's ``x`` along ``dim``, in rank order.

    ::

        rank 0: [a] ┐            ┌ [a b]
        rank 1: [b] ┘ all_gather └ [a b]

    Args:
        dst: how ranks use the result. ``"varying"``: ranks compute different things from it, and backward reduce-scatters.
            ``"invariant"``: every rank computes the same, so each takes its chunk of the common cotangent.

    Raises:
        ValueError: another ``dst``.
        LossError: "invariant" along an axis of the batch, as for `all_reduce`.

    >>> sl.simulate(lambda mesh: sl.collectives.all_gather(torch.tensor([mesh.rank]), "data"), mesh=dict(data=2))
    [tensor([0, 1]), tensor([0, 1])]
    """
    if dst not in _DST:
        raise ValueError(f"dst={dst!r}: pass 'invariant' (ranks compute the same from it) or 'varying' (they do not)")
    place = place_of(mesh, axis)
    if dst == "invariant":
        _require_one_loss(x, place, axis, 'all_gather(dst="invariant")', _VARYING)
    function = _GatherInvariant if dst == "invariant" else _Gather
    return function.apply(x, place, axis, _dim(x, dim))


def reduce_scatter(x: torch.Tensor, axis: str, *, dim: int = 0, mesh: Mesh | None = None) -> torch.Tensor:
    """Sum over ranks, then keep this rank's chunk along ``dim``; backward all-gathers.

    ::

        rank 0: [a b] ┐                ┌ [a+c]
        rank 1: [c d] ┘ reduce_scatter └ [b+d]

    Raises:
        SpecError: the dimension's size is not divisible by the axis.

    >>> sl.simulate(lambda mesh: sl.collectives.reduce_scatter(torch.arange(2), "data"), mesh=dict(data=2))
    [tensor([0]), tensor([2])]
    """
    place = place_of(mesh, axis)
    _divisible(x, _dim(x, dim), place, axis, "reduce_scatter")
    return _Scatter.apply(x, place, axis, _dim(x, dim))


def all_to_all(
    x: torch.Tensor, axis: str, *, split_dim: int, concat_dim: int, mesh: Mesh | None = None
) -> torch.Tensor:
    """Cut ``x`` along ``split_dim``, send chunk ``j`` to rank ``j``, concatenate the received chunks along ``concat_dim``.

    ::

        rank 0: [a0 a1] ┐            ┌ [a0 b0]
        rank 1: [b0 b1] ┘ all_to_all └ [a1 b1]

    Raises:
        SpecError: the split dimension's size is not divisible by the axis.

    >>> def turned(mesh):
    ...     mine = torch.tensor([[10 * mesh.rank, 10 * mesh.rank + 1]])
    ...     return sl.collectives.all_to_all(mine, "data", split_dim=1, concat_dim=0).flatten().tolist()
    >>> sl.simulate(turned, mesh=dict(data=2))
    [[0, 10], [1, 11]]
    """
    place = place_of(mesh, axis)
    _divisible(x, _dim(x, split_dim), place, axis, "all_to_all")
    return _Exchange.apply(x, place, axis, _dim(x, split_dim), _dim(x, concat_dim))


def permute(x: torch.Tensor, axis: str, pairs: Sequence[tuple[int, int]], *, mesh: Mesh | None = None) -> torch.Tensor:
    """Send ``x`` along ``(source, destination)`` pairs; zeros where nothing arrives.

    Raises:
        SpecError: a pair has a rank outside the axis, or a rank sends or receives twice.

    >>> shifted = lambda mesh: sl.collectives.permute(torch.tensor(mesh.rank), "data", [(0, 1), (1, 0)])
    >>> sl.simulate(shifted, mesh=dict(data=2))
    [tensor(1), tensor(0)]
    """
    place = place_of(mesh, axis)
    wanted = tuple((int(source), int(destination)) for source, destination in pairs)
    size = ranks(place, axis)
    sources, destinations = [pair[0] for pair in wanted], [pair[1] for pair in wanted]
    outside = [rank for rank in sources + destinations if not 0 <= rank < size]
    if outside or len(set(sources)) < len(sources) or len(set(destinations)) < len(destinations):
        raise SpecError(
            f"permute pairs {wanted} do not fit axis {axis!r} of size {size}: each rank sends once and receives once "
            "at most"
        )
    return _Permute.apply(x, place, axis, wanted)


def broadcast(x: torch.Tensor, axis: str, *, source: int = 0, mesh: Mesh | None = None) -> torch.Tensor:
    """Rank ``source``'s ``x`` on every rank; backward sums the cotangents on the source, and is zero elsewhere.

    Raises:
        SpecError: ``source`` is outside the axis.

    >>> sl.simulate(lambda mesh: sl.collectives.broadcast(torch.tensor(mesh.rank), "data", source=1), mesh=dict(data=2))
    [tensor(1), tensor(1)]
    """
    place = place_of(mesh, axis)
    if not 0 <= source < ranks(place, axis):
        raise SpecError(f"broadcast source {source} is outside axis {axis!r} of size {ranks(place, axis)}")
    return _Broadcast.apply(x, place, axis, source)


_VARYING = 'Use sl.nn.gather_batch(x), or dst="varying"'


def _require_one_loss(x: torch.Tensor, place: Place, axis: str, what: str, remedy: str) -> None:
    """Refuse a pair whose backward takes the loss for one that all ranks share, where it is the mean of the ranks' losses."""
    if _averaged(axis) and ranks(place, axis) > 1 and torch.is_grad_enabled() and differentiated(x):
        raise LossError(
            f"{what} over axis {axis!r}, along which the batch varies: its gradient would be wrong by "
            f"{ranks(place, axis)} times. {remedy}"
        )


@constant_in_graphs
def _averaged(axis: str) -> bool:
    return axis in environment().averaged


def _dim(x: torch.Tensor, dim: int) -> int:
    """``dim``, counted from 0. Raises `SpecError` where ``x`` lacks it."""
    if not -x.dim() <= dim < x.dim():
        raise SpecError(f"dimension {dim} is outside a tensor of shape {tuple(x.shape)}")
    return dim % x.dim()


def _divisible(x: torch.Tensor, dim: int, place: Place, axis: str, what: str) -> None:
    if x.shape[dim] % ranks(place, axis):
        raise SpecError(
            f"{what}: dimension {dim} of shape {tuple(x.shape)} does not divide over axis {axis!r} of size "
            f"{ranks(place, axis)}; pad it, or use another one"
        )


class _Pair(LinearFunction):
    """A `LinearFunction` whose constants are a mesh, an axis and what else there is."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        whole_in_graphs(cls)


class _SumVarying(_Pair):
    @staticmethod
    def forward(x: torch.Tensor, mesh: Place, axis: str) -> torch.Tensor:
        return ops.all_reduce(x, mesh, axis)


class _SumInvariant(_SumVarying):
    pass


class _Copy(_Pair):
    @staticmethod
    def forward(x: torch.Tensor, mesh: Place, axis: str) -> torch.Tensor:
        return x.view_as(x)


class _Gather(_Pair):
    @staticmethod
    def forward(x: torch.Tensor, mesh: Place, axis: str, dim: int) -> torch.Tensor:
        return ops.all_gather(x, mesh, axis).movedim(0, dim).flatten(dim, dim + 1).contiguous()


class _GatherInvariant(_Gather):
    pass


class _Split(_Pair):
    @staticmethod
    def forward(x: torch.Tensor, mesh: Place, axis: str, dim: int) -> torch.Tensor:
        return x.chunk(ranks(mesh, axis), dim)[mesh_of(mesh).coords[axis]].contiguous()


def _by_rank(x: torch.Tensor, mesh: Place, axis: str, dim: int) -> torch.Tensor:
    """The chunks of ``x`` along ``dim``, one for each rank of the axis, in a new first dimension."""
    size = ranks(mesh, axis)
    return x.unflatten(dim, (size, x.shape[dim] // size)).movedim(dim, 0).contiguous()


class _Scatter(_Pair):
    @staticmethod
    def forward(x: torch.Tensor, mesh: Place, axis: str, dim: int) -> torch.Tensor:
        return ops.reduce_scatter(_by_rank(x, mesh, axis, dim), mesh, axis)


class _Exchange(_Pair):
    @staticmethod
    def forward(x: torch.Tensor, mesh: Place, axis: str, split_dim: int, concat_dim: int) -> torch.Tensor:
        out = ops.all_to_all(_by_rank(x, mesh, axis, split_dim), mesh, axis)
        return out.movedim(0, concat_dim).flatten(concat_dim, concat_dim + 1).contiguous()

    @staticmethod
    def of_dual(mesh: Place, axis: str, split_dim: int, concat_dim: int) -> tuple[Any, ...]:
        return mesh, axis, concat_dim, split_dim


class _Permute(_Pair):
    @staticmethod
    def forward(x: torch.Tensor, mesh: Place, axis: str, pairs: Pairs) -> torch.Tensor:
        return ops.permute(x, mesh, axis, *itertools.chain(*pairs))

    @staticmethod
    def of_dual(mesh: Place, axis: str, pairs: Pairs) -> tuple[Any, ...]:
        return mesh, axis, tuple((destination, source) for source, destination in pairs)


class _Broadcast(_Pair):
    @staticmethod
    def forward(x: torch.Tensor, mesh: Place, axis: str, source: int) -> torch.Tensor:
        return ops.broadcast(x, mesh, axis, source)


class _SumTo(_Pair):
    """The sum over ranks on ``source``, zero elsewhere: the dual of broadcast."""

    @staticmethod
    def forward(x: torch.Tensor, mesh: Place, axis: str, source: int) -> torch.Tensor:
        out = ops.all_reduce(x, mesh, axis)
        return out if mesh_of(mesh).group(axis).rank == source else torch.zeros_like(out)


_SumVarying.dual = _SumVarying
_SumInvariant.dual, _Copy.dual = _Copy, _SumInvariant
_Gather.dual, _Scatter.dual = _Scatter, _Gather
_GatherInvariant.dual, _Split.dual = _Split, _GatherInvariant
_Exchange.dual, _Permute.dual = _Exchange, _Permute
_Broadcast.dual, _SumTo.dual = _SumTo, _Broadcast
