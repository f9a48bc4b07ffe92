"""From tokens to the rows of their experts, wherever these are, through the experts, and back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch.overrides import has_torch_function

from shardlib.collectives.tokens import Coming
from shardlib.common._compat import differentiated, outside_of_graphs
from shardlib.common.environment import environment
from shardlib.kernels.permute import permute, unpermute
from shardlib.mesh.mesh import Mesh
from shardlib.nn.moe.compute import ExpertRows
from shardlib.nn.moe.config import Expert
from shardlib.nn.moe.copies import Copies, Own, borrow
from shardlib.nn.moe.routing import NUMBER, Routing
from shardlib.nn.moe.seats import opened
from shardlib.tree import leaves_of


class ExpertExchange(Protocol):
    """What layers use of a `shardlib.collectives.tokens.TokenExchange`."""

    @property
    def axes(self) -> tuple[str, ...]: ...

    @property
    def padded(self) -> bool: ...

    @property
    def spare(self) -> int: ...

    def send(
        self,
        mesh: Mesh,
        rows: torch.Tensor,
        counts: torch.Tensor,
        *,
        slots: int | None = None,
        anchor: torch.Tensor | None = None,
    ) -> tuple[Coming, Any]: ...

    def back(self, mesh: Mesh, rows: torch.Tensor, way: Any) -> Coming: ...


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
    return ExpertVisit(params, x, routing, seats, replicas).outputs(expert)


class ExpertVisit:
    """A visit of tokens to their experts, which begins at once. Arguments as in `run_experts`.

    What is computed before `outputs` is computed while tokens travel.
    """

    def __init__(
        self,
        params: Mapping[str, Any],
        x: torch.Tensor,
        routing: Routing,
        seats: torch.Tensor | None = None,
        replicas: torch.Tensor | None = None,
    ) -> None:
        leaves, dealt = opened(params)
        self._exchange = _exchange(leaves, dealt, len(routing.counts))
        self._copies: Own | Copies = Own.of(leaves, x)
        if replicas is not None and self._exchange.spare:
            self._copies = copies = borrow(params, seats, replicas, self._exchange)
            routing = routing.seated(copies.slots, copies.number)
        elif seats is not None:
            routing = routing.seated(seats)
        self._routing, self._rows = routing, ExpertRows.of(routing)
        rows = permute(x, self._rows.positions, self._rows.number)
        # By a leaf of the experts, which ranks train alike, backward reaches the exchange on a rank whose tokens need no
        # gradient; the others would wait for it.
        anchor = next(
            (leaf for leaf in leaves_of(leaves) if isinstance(leaf, torch.Tensor) and differentiated(leaf)), None
        )
        how = {"slots": _slots(routing) if self._exchange.padded else None, "anchor": anchor}
        self._coming, self._way = self._exchange.send(environment().mesh, rows, self._rows.counts, **how)

    def outputs(self, expert: Expert) -> torch.Tensor:
        """See `run_experts`."""
        results = self._copies.outputs(expert, self._coming.wait(), self._way.ends)
        back = self._exchange.back(environment().mesh, results, self._way)
        return unpermute(back.wait(), self._rows.positions, self._routing.weights)


class _Here(NamedTuple):
    """Rows that are where their experts are, as what comes, and as their way."""

    rows: torch.Tensor
    ends: torch.Tensor

    def wait(self) -> torch.Tensor:
        return self.rows


class _Travel:
    """The plan's exchange, which torch.compile leaves as it is: a graph ends before it, and another begins after.

    Its sizes are known only in the run, and what it sends is not made of operators.
    """

    def __init__(self, exchange: ExpertExchange) -> None:
        self._exchange, self.axes = exchange, exchange.axes
        self.padded, self.spare = exchange.padded, exchange.spare

    @outside_of_graphs
    def send(self, mesh: Any, rows: torch.Tensor, counts: torch.Tensor, **how: Any) -> tuple[_Awaited, Any]:
        coming, way = self._exchange.send(mesh, rows, counts, **how)
        return _Awaited(coming), way

    @outside_of_graphs
    def back(self, mesh: Any, rows: torch.Tensor, way: Any) -> _Awaited:
        return _Awaited(self._exchange.back(mesh, rows, way))


class _Awaited:
    """Rows under way, for which torch.compile waits outside of its graphs."""

    def __init__(self, coming: Coming) -> None:
        self._coming = coming

    @outside_of_graphs
    def wait(self) -> torch.Tensor:
        return self._coming.wait()


class _Stay:
    """The exchange of tokens whose experts are all on their rank."""

    padded, spare = False, 0

    def send(self, mesh: Any, rows: torch.Tensor, counts: torch.Tensor, **how: Any) -> tuple[_Here, _Here]:
        here = _Here(rows, counts.cumsum(0))
        return here, here

    def back(self, mesh: Any, rows: torch.Tensor, way: _Here) -> _Here:
        return way._replace(rows=rows)


def _slots(routing: Routing) -> int:
    if routing.slots is None:
        raise ValueError(
            "sl.experts(padded=True) pads the rows of every expert to its capacity, and this layer's router has none: give "
            "the router a capacity (shardlib.nn.routers.Capacity), or leave padded out"
        )
    return routing.slots


def _exchange(params: Mapping[str, Any], dealt: bool | None, experts: int) -> Any:
    """How tokens get to the experts of a layer: by the plan's exchange if they are dealt out, else not at all."""
    exchange, mesh = environment().tokens, environment().mesh
    ways = math.prod(mesh.shape[axis] for axis in exchange.axes) if dealt and exchange and mesh else 1
    leaves = leaves_of(params)
    held = {leaf.shape[0] if leaf.shape else 1 for leaf in leaves}
    if dealt is None:
        raise ValueError(
            f"of the leaves of a layer of {experts} experts sl.experts deals out some and not others: name all leaves of a "
            "layer's experts in its rules, or none"
        )
    # Slices of leaves that are whole along the axis know themselves whether they cut experts or each expert.
    if (dealt or not has_torch_function(leaves)) and {size * ways for size in held} - {experts}:
        over = f", on each of {ways} ranks," if ways > 1 else ""
        raise ValueError(
            f"the routing is among {experts} experts, and the leaves hold {', '.join(map(str, sorted(held)))} of them{over} "
            f"along dimension 0: give every leaf all experts, and the routing their number. {NUMBER}"
        )
    return _Travel(exchange) if dealt and exchange else _Stay()
