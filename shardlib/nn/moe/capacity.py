"""`Capacity`: how many assignments an expert takes, and which ones it drops."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import torch

from shardlib.common.environment import environment
from shardlib.kernels import counter
from shardlib.kernels.routing import by_expert
from shardlib.rng import Key

# Random numbers of tokens: the same for the same token on every mesh.


_UNIT = 2.0**-24  # of random bits


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
        return ((self.bits(name, columns).double() + 0.5) * _UNIT).float().clamp(max=1 - _UNIT)

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
        counts, positions = by_expert(keys, number)
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
