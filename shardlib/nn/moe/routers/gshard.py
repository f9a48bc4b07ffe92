"""The best expert of each token and a second one."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardlib.nn.moe.routers.base import Router, best, renormalised, require_renormalised
from shardlib.nn.moe.routing import Capacity, Tokens

SECONDS = ("best", "kept at random", "sampled")


@dataclass(frozen=True, kw_only=True)
class GShard(Router):
    """The router that `gshard` makes."""

    second: str = "kept at random"
    renormalise: str | None = "chosen"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_renormalised(self.renormalise)
        if self.second not in SECONDS:
            raise ValueError(f"second={self.second!r}: use one of {', '.join(map(repr, SECONDS))}")

    def choose(
        self, logits: torch.Tensor, tokens: Tokens | None, balance: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.scores(logits) if balance is None else self.scores(logits) + balance
        experts = best(scores, 2)
        if self.second == "sampled" and tokens is not None:
            others = logits + tokens.gumbel("second", logits.shape[1])
            second = best(others.scatter(1, experts[:, :1], -torch.inf), 1)
            experts = torch.cat([experts[:, :1], second], 1)
        wanted = torch.ones_like(experts, dtype=torch.bool)
        if self.second == "kept at random" and tokens is not None:
            shares = logits.gather(1, experts).softmax(1)
            wanted = torch.cat([wanted[:, :1], 2 * shares[:, 1:] > tokens.uniform("second", 1)], 1)
        return experts, wanted

    def weights(
        self, logits: torch.Tensor, scores: torch.Tensor, experts: torch.Tensor, keeps: torch.Tensor
    ) -> torch.Tensor:
        return renormalised(self.renormalise, scores.gather(1, experts), keeps)


def gshard(
    capacity: Capacity | None = None, *, second: str = "kept at random", renormalise: str | None = "chosen"
) -> GShard:
    """A router that sends each token to its best expert and to a second one (arXiv 2006.16668, algorithm 1).

    The load loss counts first choices. DeepSpeed's top-2 gate is ``gshard(Capacity(1.0, priority="choice"), second="sampled",
    renormalise="kept")``.

    Args:
        capacity: drops assignments; None keeps all. In the paper first choices come before second ones:
            ``priority="choice"``.
        second: which expert is the second, in training: "kept at random", the second best, with the probability twice its
            share of the two scores; "sampled", one drawn by the scores of all but the first (DeepSpeed); "best", the second
            best, as in evaluation.
        renormalise: what a token's weights are divided by; see `top_k`.

    Raises:
        ValueError: an unknown setting; in a call, fewer than two experts.

    >>> routing = sl.nn.routers.gshard()(torch.tensor([[2.0, 0.0, 1.0]]))
    >>> routing.experts.tolist(), routing.weights.tolist()
    ([[0, 2]], [[0.7310..., 0.2689...]])
    """
    return GShard(capacity=capacity, load="first", second=second, renormalise=renormalise)
