"""`Routing`: which experts each token goes to, as a value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from shardlib.common._compat import require_async
from shardlib.common.once import once
from shardlib.kernels import routing

# The remedy for a routing of another number of experts.
NUMBER = (
    "Take the number from the router: under sl.experts the leaves of experts have this rank's alone along dimension 0."
)


class Routing(NamedTuple):
    """The experts that each token goes to: a router hands it out, and `moe` computes by it.

    An assignment is a token's j-th choice. It has the number ``token · k + j``.

    Attributes:
        experts: ``[T, k]``, int64: the chosen experts.
        weights: ``[T, k]``, at least fp32: the share of each expert's output; 0 where the assignment was dropped.
        counts: ``[E]``, int64: assignments per expert, before drops.
        kept: ``[R]``, int64: the numbers of the assignments that were kept, by expert and then by number. R depends on
            sizes alone; what is left over at the end is ``T · k``.
        aux: numbers without dimensions. "load", the auxiliary load loss, and "z", the z-loss, have gradients; add them to a
            loss with a coefficient. "entropy" is the mean over tokens of the entropy of the router's probabilities, and
            "dropped" the share of assignments that were dropped (of tokens that no expert took, where experts choose), 0
            where there was none to drop.
        slots: the most assignments that one expert keeps, where sizes alone bound it; else None.

    >>> routing = sl.nn.routers.top_k(1)(torch.tensor([[0.0, 1.0], [2.0, 0.0], [0.0, 3.0]]))
    >>> routing.experts[:, 0].tolist(), routing.counts.tolist(), routing.kept.tolist()
    ([1, 0, 1], [1, 2], [1, 0, 2])
    """

    experts: torch.Tensor
    weights: torch.Tensor
    counts: torch.Tensor
    kept: torch.Tensor
    aux: Mapping[str, torch.Tensor]
    slots: int | None = None

    @classmethod
    def of(cls, experts: torch.Tensor, weights: torch.Tensor, number: int) -> Routing:
        """The routing of choices that were made elsewhere, all of which are kept; without ``aux``.

        Args:
            experts: ``[T, k]``, int64; −1 is no expert.
            weights: ``[T, k]``.
            number: of experts.

        Raises:
            ValueError: choices that are not ``[T, k]`` and int64, or weights of another shape.
            RuntimeError: a choice outside of −1 … number − 1; on accelerators without synchronisation.
        """
        if experts.dim() != 2 or experts.dtype is not torch.int64 or weights.shape != experts.shape:
            raise ValueError(
                f"Routing.of: choices are {tuple(experts.shape)} of {experts.dtype}, and weights {tuple(weights.shape)}; "
                "both must be [tokens, choices], and choices int64"
            )
        fits = ((experts >= -1) & (experts < number)).all()
        require_async(fits, f"Routing.of: a choice is not among −1 … {number - 1}, of {number} experts. {NUMBER}")
        experts, counts, kept = once(lambda: [experts, *_all_kept(experts, number)])
        return cls(experts, weights, counts, kept, {})

    def seated(self, seats: torch.Tensor, number: int | None = None) -> Routing:
        """This routing among seats: expert e has the number ``seats[e]``, and the order of each expert's rows is the same.

        A seat is the row of its layer's leaves in which an expert lies; `shardlib.relayout` changes it.

        Args:
            seats: ``[E]``, int64, all different.
            number: of seats; by default as many as experts.

        >>> routing = sl.nn.routers.Routing.of(torch.tensor([[0], [2], [0]]), torch.ones(3, 1), 3)
        >>> seated = routing.seated(torch.tensor([2, 1, 0]))
        >>> seated.experts[:, 0].tolist(), seated.counts.tolist(), seated.kept.tolist()
        ([2, 0, 2], [1, 0, 2], [1, 0, 2])
        """
        chosen = is_kept(self.kept, self.experts)
        experts = torch.where(self.experts >= 0, seats[self.experts], -1)
        number = len(seats) if number is None else number
        _, positions = routing.by_expert(torch.where(chosen, experts, -1), number)
        counts = self.counts.new_zeros(number).scatter(0, seats, self.counts)
        return self._replace(experts=experts, counts=counts, kept=in_order(positions, len(self.kept)))


def _all_kept(experts: torch.Tensor, number: int) -> list[torch.Tensor]:
    counts, positions = routing.by_expert(experts, number)
    return [counts, in_order(positions, experts.numel())]


def in_order(positions: torch.Tensor, rows: int) -> torch.Tensor:
    """``[rows]``: the numbers of assignments by their ``positions`` ``[T, k]``, of which −1 is none, and T · k after them."""
    last = positions.numel()
    numbers = torch.arange(last, device=positions.device)
    places = positions.where(positions >= 0, rows).flatten()
    return positions.new_full((rows + 1,), last).scatter(0, places, numbers)[:rows]


def is_kept(kept: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """``[T, k]``: whether each assignment is among those that are ``kept``."""
    found = torch.zeros(experts.numel() + 1, dtype=torch.bool, device=experts.device)
    return found.index_fill(0, kept, True)[:-1].view(experts.shape)
