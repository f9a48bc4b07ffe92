"""From tokens to the rows of their experts, wherever these are, through the experts, and back."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function

from shardlib.collectives.tokens import PendingRows, TokenExchange
from shardlib.collectives.tokens.fetch import TokenFetch
from shardlib.common._compat import differentiated, outside_of_graphs
from shardlib.common.environment import environment
from shardlib.kernels.grouped_matmul import grouped_matmul
from shardlib.kernels.permute import permute, unpermute
from shardlib.mesh.mesh import Mesh, rank_of
from shardlib.nn.moe.placement import ExpertPlacement, local_experts
from shardlib.nn.moe.routing import NUMBER, Routing
from shardlib.tree import leaves_of, tree_map

# ``product(rows, weight, bias=None)``: as F.linear, each row with the matrix of its own expert.
Product = Callable[..., torch.Tensor]
# ``expert(params, rows, product)``: the outputs for rows of inputs.
Expert = Callable[[Mapping[str, Any], torch.Tensor, Product], torch.Tensor]


@dataclass(frozen=True)
class Groups:
    """Rows that are sorted by the expert that computes on them.

    Attributes:
        ends: ``[E]``, int64: the row after each expert's last one.
        number: of rows. Those after the last end have the last expert.
    """

    ends: torch.Tensor
    number: int

    @cached_property
    def experts(self) -> torch.Tensor:
        """``[R]``: the expert of each row."""
        rows = torch.arange(self.number, device=self.ends.device)
        return torch.searchsorted(self.ends, rows, right=True).clamp(max=len(self.ends) - 1)

    def product(self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``rows`` ``[R, in]`` times their experts' ``weight`` ``[E, out, in]``, plus their ``bias`` ``[E, out]``."""
        return expert_linear(rows, weight, bias, self)


def expert_linear(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, groups: Groups) -> torch.Tensor:
    """See `Groups.product`. Of a slice of ``weight`` that `tensor_slicing` cut, its style computes this rank's share.

    A ``weight`` that is no tensor, such as a quantised one, is `grouped_matmul`'s matter.
    """
    tensors = (weight, bias) if isinstance(weight, torch.Tensor) else (bias,)
    if has_torch_function(tensors):
        return handle_torch_function(expert_linear, tensors, rows, weight, bias, groups)
    return grouped_matmul(rows, weight, groups.ends, bias)


class StoredExperts:
    """A leaf of experts in another memory than the device's, as a layer of experts gets it.

    Attributes:
        shape, dtype: of the leaf, the experts along dimension 0.
        store: brings the layer's experts to the device; see `shardlib.models.decoding.experts_on_host.LayerStore`.
        device: the device; until `to`, where the leaf was.
    """

    shape: Any
    dtype: Any
    store: Any
    device: Any

    requires_grad = False

    def __init__(self, shape: torch.Size, dtype: torch.dtype, store: Any, device: torch.device) -> None:
        self.shape, self.dtype, self.store, self.device = shape, dtype, store, device

    def to(self, device: torch.device) -> StoredExperts:
        """The same for ``device``, to which its experts come one by one."""
        return StoredExperts(self.shape, self.dtype, self.store, device)


def run_experts(
    params: Mapping[str, Any],
    x: torch.Tensor,
    routing: Routing,
    expert: Expert,
    seats: torch.Tensor | None = None,
    replicas: torch.Tensor | None = None,
) -> torch.Tensor:
    """The experts' outputs, weighted and summed: ``y_t = Σ_j w_tj · expert_e(x_t)``, e the token's j-th choice.

    The part of `moe` below the router, for layers with a router of their own (`Routing.of` makes a routing of choices).
    Under `shardlib.experts` each rank has some of the experts, and tokens travel to them and back.

    Args:
        params: what ``expert`` takes, each leaf with the experts along dimension 0.
        x: ``[T, W]``.
        routing: of T tokens, among all experts.
        expert: ``expert(params, rows, product)``, as in `shardlib.nn.MoEConfig`.
        seats: ``[E]``, int64: the row of the leaves in which each expert lies (`shardlib.relayout`); by default its own.
        replicas: ``[E]``, int64: the spare slot in which each expert has a second copy, −1 for none; used where
            `shardlib.experts` has ``spare`` slots.

    Returns:
        ``[T, W']``, W' the width of the experts' outputs.

    Raises:
        ValueError: leaves with other numbers of experts than the routing and the plan have, or seats that are no permutation.

    >>> routing = sl.nn.routers.Routing.of(torch.tensor([[1], [0]]), torch.tensor([[1.0], [0.5]]), 2)
    >>> double = lambda params, rows, product: 2 * product(rows, params["w"])
    >>> sl.nn.run_experts({"w": torch.tensor([[[1.0]], [[10.0]]])}, torch.tensor([[1.0], [2.0]]), routing, double).tolist()
    [[20.0], [2.0]]
    """
    return Dispatch(params, x, routing, seats, replicas).combined(expert)


class Dispatch:
    """Tokens on their way to their experts, which begins at once. Arguments as in `run_experts`.

    What is computed before `combined` is computed while tokens travel.
    """

    def __init__(
        self,
        params: Mapping[str, Any],
        x: torch.Tensor,
        routing: Routing,
        seats: torch.Tensor | None = None,
        replicas: torch.Tensor | None = None,
    ) -> None:
        self._params, sharded = local_experts(params)
        leaves = leaves_of(self._params)
        self._exchange = exchange = _exchange(leaves, sharded, len(routing.counts))
        self._store = next((leaf.store for leaf in leaves if isinstance(leaf, StoredExperts)), None)
        if self._store is not None:
            self._store.expect(x)
        self._replicas: Replicas | None = None
        if replicas is not None and exchange is not None and exchange.spare:
            self._replicas = _fetch_replicas(params, seats, replicas, exchange)
            routing = routing.seated(self._replicas.slots, self._replicas.number)
        elif seats is not None:
            routing = routing.seated(seats)
        self._positions, counts = _by_expert(routing)
        self._weights, rows = routing.weights, permute(x, self._positions, routing.kept.shape[0])
        if exchange is None:
            self._rows, self._ends = rows, counts.cumsum(0)
            return
        # By a leaf of the experts, which ranks train alike, backward reaches the exchange on a rank whose tokens need no
        # gradient; the others would wait for it.
        anchor = next((leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and differentiated(leaf)), None)
        how = {"slots": _slots(routing) if exchange.padded else None, "anchor": anchor}
        self._coming, self._way = _send(exchange, environment().mesh, rows, counts, how)

    def combined(self, expert: Expert) -> torch.Tensor:
        """See `run_experts`."""
        if self._exchange is None:
            return unpermute(self._outputs(expert, self._rows, self._ends), self._positions, self._weights)
        results = self._outputs(expert, _wait(self._coming), self._way.ends)
        back = _send_back(self._exchange, environment().mesh, results, self._way)
        return unpermute(_wait(back), self._positions, self._weights)

    def _outputs(self, expert: Expert, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """The results of ``rows`` ``[R, W]``, which are sorted by expert, or by slot, and have these ``ends``."""
        if self._replicas is not None:
            return self._replicas.outputs(expert, rows, ends)
        if self._store is not None:
            return self._store.outputs(expert, self._params, rows, ends)
        return expert(self._params, rows, Groups(ends, rows.shape[0]).product)


def _by_expert(routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
    """Of rows that are sorted by expert: the row of each assignment ``[T, k]``, −1 where it was dropped, and how many rows
    each expert has, ``[E]``. Rows at the end may be left over."""
    kept, shape, number = routing.kept, routing.experts.shape, len(routing.counts)
    numbers = torch.arange(kept.shape[0], device=kept.device)
    positions = kept.new_full((routing.experts.numel() + 1,), -1).scatter(0, kept, numbers)[:-1].view(shape)
    experts = torch.cat([routing.experts.flatten(), routing.experts.new_full((1,), number)])[kept]
    ends = torch.searchsorted(experts, torch.arange(number, device=kept.device), right=True)
    return positions, ends.diff(prepend=ends.new_zeros(1))


# torch.compile leaves the exchange as it is: a graph ends before it, and another begins after. Its sizes are known only in
# the run, and what it sends is not made of operators.


@outside_of_graphs
def _send(
    exchange: TokenExchange, mesh: Mesh, rows: torch.Tensor, counts: torch.Tensor, how: Mapping[str, Any]
) -> tuple[PendingRows, Any]:
    return exchange.send(mesh, rows, counts, **how)


@outside_of_graphs
def _send_back(exchange: TokenExchange, mesh: Mesh, rows: torch.Tensor, way: Any) -> PendingRows:
    return exchange.back(mesh, rows, way)


@outside_of_graphs
def _wait(coming: PendingRows) -> torch.Tensor:
    return coming.wait()


def _slots(routing: Routing) -> int:
    if routing.slots is None:
        raise ValueError(
            "sl.experts(padded=True) pads an expert's rows to its capacity, and this router has none. Give it a "
            "shardlib.nn.routers.Capacity, or leave padded out"
        )
    return routing.slots


def _exchange(leaves: list[Any], sharded: bool | None, experts: int) -> TokenExchange | None:
    """The plan's exchange of tokens, if a layer's experts are sharded; None if all of them are here."""
    exchange, mesh = environment().tokens, environment().mesh
    ways = math.prod(mesh.shape[axis] for axis in exchange.axes) if sharded and exchange and mesh else 1
    held = {leaf.shape[0] if leaf.shape else 1 for leaf in leaves}
    if sharded is None:
        raise ValueError(
            "sl.experts deals out some leaves of a layer and not others; name all of them in its rules, or none"
        )
    # Slices of leaves that are whole along the axis know themselves whether they cut experts or each expert.
    if (sharded or not has_torch_function(leaves)) and {size * ways for size in held} - {experts}:
        over = f", on each of {ways} ranks," if ways > 1 else ""
        raise ValueError(
            f"the routing is among {experts} experts, and the leaves hold {', '.join(map(str, sorted(held)))} of them{over} "
            f"along dimension 0. {NUMBER}"
        )
    return exchange if sharded else None


class Replicas:
    """This rank's experts for rows of each half of the ranks, and replicas of other ranks' experts, whose weights are under
    way. They travel as they are, whatever encodes tokens.

    Attributes:
        slots: ``[E]``, int64: where this rank sends its rows for each expert (`ExpertPlacement`).
        number: of slots of all ranks.
    """

    number: int

    def __init__(self, params: Mapping[str, Any], placed: ExpertPlacement, axes: tuple[str, ...], mesh: Mesh) -> None:
        self._params, self._mesh, self._of_rank, self.number = params, mesh, placed.of_rank, placed.number
        rank = rank_of({axis: mesh.shape[axis] for axis in axes}, mesh.coords)
        self.slots: Any = torch.tensor(placed.of_rows(rank), device=mesh.device)
        fetch, rows = TokenFetch(axes, placed.owners), placed.rows(rank)
        self._coming: Mapping[str, PendingRows] = tree_map(
            lambda leaf: fetch.start(mesh, leaf.rows_for_replicas(rows)), params
        )

    @outside_of_graphs
    def _landed(self) -> list[Mapping[str, Any]]:
        """For the slots of each kind, the leaves."""
        own = tree_map(lambda leaf: leaf.local(), self._params)
        replicas = tree_map(lambda leaf, coming: leaf.replicas(coming.wait()), self._params, self._coming)
        return [own, own, replicas]

    @outside_of_graphs
    def _lengths(self, rows: int, ends: torch.Tensor) -> list[int]:
        """The number of rows for the slots of each kind, which the host reads; the last have those that are left over."""
        lasts = list(itertools.accumulate(self._of_rank))[:-1]
        if self._mesh.abstract:  # a plan's trace knows no numbers, and takes slots to have equally many rows
            stops = [rows * last // sum(self._of_rank) for last in lasts]
        else:
            stops = ends[[last - 1 for last in lasts]].tolist()
        return [stop - start for start, stop in itertools.pairwise([0, *stops, rows])]

    def outputs(self, expert: Expert, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """The results of ``rows`` ``[R, W]``, which are sorted by slot and have these ``ends``."""
        parts = rows.split(self._lengths(len(rows), ends))
        results, start = [], 0
        for params, part, some in zip(self._landed(), parts, ends.split(list(self._of_rank)), strict=True):
            results.append(expert(params, part, Groups(some - start, len(part)).product))
            start += len(part)
        return torch.cat(results)


@outside_of_graphs
def _fetch_replicas(
    params: Mapping[str, Any], seats: torch.Tensor | None, replicas: torch.Tensor, exchange: TokenExchange
) -> Replicas:
    """Start to fetch the replicas that ``replicas`` ``[E]`` says. The host reads both it and ``seats``."""
    mesh, number = environment().mesh, len(replicas)
    assert mesh is not None
    ranks = math.prod(mesh.shape[axis] for axis in exchange.axes)
    if mesh.abstract:
        placed = ExpertPlacement.assumed(number, ranks, exchange.spare)
    else:
        where = range(number) if seats is None else seats.tolist()
        placed = ExpertPlacement(tuple(where), tuple(replicas.tolist()), ranks, exchange.spare)
    return Replicas(params, placed, tuple(exchange.axes), mesh)
