"""Experts that choose their tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from shardlib.nn.moe.routers.base import Router
from shardlib.nn.moe.routing import Tokens, share_of


@dataclass(frozen=True, kw_only=True)
class ExpertChoice(Router):
    """The router that `expert_choice` makes. Each token has an assignment per expert, of which most are not wanted."""

    factor: float

    causal: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.factor > 0:
            raise ValueError(f"expert_choice({self.factor}): the factor must be positive")

    def choose(
        self, logits: torch.Tensor, tokens: Tokens | None, balance: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.scores(logits) if balance is None else self.scores(logits) + balance
        count, number = scores.shape
        order = scores.argsort(dim=0, descending=True, stable=True)
        wanted = torch.zeros_like(scores, dtype=torch.bool).scatter(0, order[: self.tokens_of_one(count, number)], True)
        return torch.arange(number, device=scores.device).expand(count, number), wanted

    def tokens_of_one(self, count: int, number: int) -> int:
        """How many of ``count`` tokens one of ``number`` experts takes."""
        return min(count, share_of(self.factor, count, number))

    def slots(self, shape: tuple[int, ...], number: int) -> int:
        return self.tokens_of_one(shape[0], number)

    def weights(
        self, logits: torch.Tensor, scores: torch.Tensor, experts: torch.Tensor, keeps: torch.Tensor
    ) -> torch.Tensor:
        return torch.where(keeps, scores, 0)

    def dropped(self, keeps: torch.Tensor, counts: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        wanted = (torch.ones_like(keeps[:, 0]) if mask is None else mask).sum()
        return (wanted - keeps.any(1).sum()) / wanted.clamp(min=1)


def expert_choice(factor: float) -> ExpertChoice:
    """A router in which each expert takes the ``factor · T / E`` tokens that score highest for it (arXiv 2202.09368).

    Loads are equal without a loss, and a token may get any number of experts; places that padding takes (`moe`'s ``mask``)
    stay free. Which tokens an expert takes depends on all tokens of the batch, later ones too: a causal language model that
    is trained so sees what it cannot see when it generates.

    Args:
        factor: the mean number of experts per token.

    Raises:
        ValueError: a factor that is not positive.

    >>> routing = sl.nn.routers.expert_choice(1.0)(torch.tensor([[2.0, 0.0], [1.0, 0.0]]))
    >>> routing.weights.tolist()
    [[0.8807..., 0.0], [0.0, 0.2689...]]
    """
    return ExpertChoice(factor=factor)
