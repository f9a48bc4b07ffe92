"""`Routing`: which experts each token goes to, as a value; `Capacity`: how many assignments an expert takes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import torch

from shardlib.common._compat import require_async
from shardlib.common.environment import environment, once
from shardlib.kernels import counter, routing
from shardlib.rng import Key

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

        def all_kept() -> list[torch.Tensor]:
            counts, positions = routing.by_expert(experts, number)
            return [experts, counts, in_order(positions, experts.numel())]

        experts, counts, kept = once(all_kept)
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


class Tokens(NamedTuple):
    """A key, and where a batch's tokens are in the global batch.

    Attributes:
        rows: of the batch, dimension 0, that the caller holds.
        places: ``[tokens of a row]``, int64: where each is among the tokens of its row in the global batch.
        length: the number of these.
    """

    key: Key
    rows: int
    places: torch.Tensor
    length: int

    def bits(self, name: str, columns: int) -> torch.Tensor:
        """``[T, columns]``: 24 random bits each; other names give others."""
        device = self.places.device
        seed, first = self.key.fold_in(name).stretch(self.rows)
        starts = torch.arange(first, first + self.rows, device=device) * self.length
        indices = (starts[:, None] + self.places).flatten()
        return counter.random_bits(seed, indices[:, None] * columns + torch.arange(columns, device=device))

    def uniform(self, name: str, columns: int) -> torch.Tensor:
        """``[T, columns]`` in fp32, in (0, 1)."""
        unit = 2.0**-24  # of random bits
        return ((self.bits(name, columns).double() + 0.5) * unit).float().clamp(max=1 - unit)

    def gumbel(self, name: str, columns: int) -> torch.Tensor:
        """``[T, columns]`` of a Gumbel distribution: the largest of ``logits + gumbel`` is drawn as from their softmax."""
        return -(-self.uniform(name, columns).log()).log()


def tokens_of(x: torch.Tensor, key: Key | None) -> Tokens | None:
    """What the random numbers of the tokens of ``x`` ``[..., width]`` are drawn by; None without a key.

    Dimension 0 is the batch, and under a sequence plan dimension 1 this rank's sequence part.
    """
    if key is None:
        return None
    rows, *others = x.shape[:-1] or (1,)
    parts = environment().parts
    if parts is None or not others:
        length = math.prod(others)
        return Tokens(key, rows, torch.arange(length, device=x.device), length)
    positions, length = parts.positions(x)
    rest = math.prod(others[1:])
    places = positions[:, None] * rest + torch.arange(rest, device=x.device)
    return Tokens(key, rows, places.flatten(), length * rest)


PRIORITIES = ("position", "choice", "probability", "random")


def share_of(factor: float, count: int, number: int) -> int:
    """``ceil(factor · count / number)``, in whole numbers, so that ``count`` may be a length in a trace."""
    exact = Fraction(str(factor))  # as it is written: 1.1 is 11/10, and not the binary number next to it, a little more
    return -(-exact.numerator * count // (exact.denominator * number))


@dataclass(frozen=True)
class Capacity:
    """The number of assignments an expert takes of a batch, ``max(ceil(factor · k · T / E), minimum)``; it drops the others.

    Every rank counts its own tokens.

    Attributes:
        factor: 1 suffices where loads are equal.
        minimum: the least capacity.
        priority: which assignments are kept: "position", the first tokens'; "choice", first choices before second ones, and
            in each the first tokens' (GShard, DeepSpeed's top-2); "probability", those of the highest scores (DeepSpeed's
            top-k); "random", drawn by counted numbers (DeepSpeed's random token selection). Without a key, as in evaluation,
            "random" keeps the first tokens' assignments. Of equals, the first.

    Raises:
        ValueError: a factor that is not positive, a negative minimum, or an unknown priority.

    >>> sl.nn.routers.Capacity(1.25, minimum=4).of(tokens=1000, choices=2, experts=8)
    313
    """

    factor: float
    minimum: int = 4
    priority: str = "position"

    def __post_init__(self) -> None:
        if not self.factor > 0 or self.minimum < 0:
            raise ValueError(f"{self}: the factor must be positive, and the minimum 0 or more")
        if self.priority not in PRIORITIES:
            raise ValueError(f"{self}: use one of {', '.join(map(repr, PRIORITIES))} as priority")

    def of(self, tokens: int, choices: int, experts: int) -> int:
        """The capacity of an expert."""
        return max(share_of(self.factor, choices * tokens, experts), self.minimum)

    def keeps(
        self,
        experts: torch.Tensor,
        wanted: torch.Tensor,
        scores: torch.Tensor,
        number: int,
        tokens: Tokens | None,
    ) -> torch.Tensor:
        """``[T, k]``: which of the assignments that are ``wanted`` their experts keep.

        Args:
            experts, scores: ``[T, k]``: the choices, and their scores.
            number: of experts.
            tokens: what random numbers are drawn by.
        """
        count, choices = experts.shape
        order = self._order(experts, scores, number, tokens)
        keys = torch.where(wanted, experts, -1).flatten()[order]
        counts, positions = routing.by_expert(keys, number)
        rank = positions - (counts.cumsum(0) - counts)[keys]
        fits = (keys >= 0) & (rank < self.of(count, choices, number))
        return torch.empty_like(fits).scatter(0, order, fits).view(experts.shape)

    def _order(self, experts: torch.Tensor, scores: torch.Tensor, number: int, tokens: Tokens | None) -> torch.Tensor:
        """The numbers of all assignments, the ones to be kept first."""
        if self.priority == "choice":
            return torch.arange(experts.numel(), device=experts.device).view(experts.shape).T.flatten()
        if self.priority == "probability":
            return scores.flatten().argsort(descending=True, stable=True)
        if self.priority == "random" and tokens is not None:
            return tokens.bits("capacity", number).gather(1, experts).flatten().argsort(stable=True)
        return torch.arange(experts.numel(), device=experts.device)
