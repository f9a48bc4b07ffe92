"""The k best experts of each token."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardlib.nn.moe.routers.base import Router, best, renormalised, require_renormalised
from shardlib.nn.moe.routing import Capacity, Tokens


@dataclass(frozen=True, kw_only=True)
class TopK(Router):
    """The router that `top_k` makes."""

    k: int
    score: str = "softmax"
    renormalise: str | None = None
    scale: float = 1.0
    groups: int = 1
    kept_groups: int = 1
    sampled: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require_renormalised(self.renormalise)
        if self.score not in ("softmax", "sigmoid"):
            raise ValueError(f"score={self.score!r}: use 'softmax' or 'sigmoid'")
        if self.k < 1 or not 1 <= self.kept_groups <= self.groups:
            how = f"k={self.k}, groups={self.groups}, kept_groups={self.kept_groups}"
            raise ValueError(f"top_k({how}): choose at least one expert and group, and at most all groups")

    def scores(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.softmax(1) if self.score == "softmax" else logits.sigmoid()

    def probabilities(self, scores: torch.Tensor) -> torch.Tensor:
        if self.score == "softmax":
            return scores
        return renormalised("chosen", scores, torch.ones_like(scores, dtype=torch.bool))

    def choose(
        self, logits: torch.Tensor, tokens: Tokens | None, balance: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.sampled and tokens is not None:
            logits = logits + tokens.gumbel("experts", logits.shape[1])
        scores = self.scores(logits)
        if balance is not None:
            scores = scores + balance
        if self.groups > 1:
            scores = self._within_groups(scores)
        experts = best(scores, self.k)
        return experts, torch.ones_like(experts, dtype=torch.bool)

    def _within_groups(self, scores: torch.Tensor) -> torch.Tensor:
        """The scores of the experts in each token's best groups, and −inf for the others."""
        experts = scores.shape[1]
        if experts % self.groups or self.k > experts // self.groups * self.kept_groups:
            raise ValueError(
                f"{experts} experts in {self.groups} groups of which {self.kept_groups} are kept: the groups must be of "
                f"equal size, and those kept must have {self.k} experts"
            )
        by_group = scores.view(scores.shape[0], self.groups, -1)
        kept = best(by_group.topk(min(2, by_group.shape[2]), dim=2).values.sum(2), self.kept_groups)
        left_out = torch.ones(by_group.shape[:2], dtype=torch.bool, device=scores.device).scatter(1, kept, False)
        return by_group.masked_fill(left_out[..., None], -torch.inf).flatten(1)

    def weights(
        self, logits: torch.Tensor, scores: torch.Tensor, experts: torch.Tensor, keeps: torch.Tensor
    ) -> torch.Tensor:
        if self.score == "softmax" and self.renormalise is not None:
            # The same numbers as scores over their sum, which for logits far below the largest one would be 0 over 0.
            chosen = logits.gather(1, experts).softmax(1)
        else:
            chosen = scores.gather(1, experts)
        return renormalised(self.renormalise, chosen, keeps) * self.scale


def top_k(
    k: int,
    *,
    score: str = "softmax",
    renormalise: str | None = None,
    scale: float = 1.0,
    groups: int = 1,
    kept_groups: int = 1,
    sampled: bool = False,
    capacity: Capacity | None = None,
    load: str = "mean",
) -> TopK:
    """A router that sends each token to the ``k`` experts of the highest scores; of equals, to the first.

    =============  ======================================================================================================
    a model        its router
    =============  ======================================================================================================
    Mixtral        ``top_k(2, renormalise="chosen", load="sum")``
    Qwen3-MoE      ``top_k(8, renormalise="chosen", load="sum")`` with ``norm_topk_prob``, which is off by default
    OLMoE          ``top_k(8, load="sum")``
    GPT-OSS        ``top_k(4, renormalise="chosen", load="sum")``: a softmax over the chosen logits
    DeepSeek-V3    ``top_k(8, score="sigmoid", renormalise="chosen", scale=2.5, groups=8, kept_groups=4)``
    DeepSpeed      ``top_k(k, renormalise="kept", capacity=sl.nn.routers.Capacity(1.0, priority="probability"))``
    =============  ======================================================================================================

    Args:
        score: "softmax" or "sigmoid" of the logits, in fp32 or wider.
        renormalise: what a token's weights are divided by: None by nothing, "chosen" by the sum of its choices' scores,
            "kept" by the sum over the choices that were not dropped.
        scale: a factor of all weights.
        groups: a number of groups of consecutive experts. A token's experts come from the ``kept_groups`` groups whose best
            two scores have the largest sums (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).
        sampled: whether Gumbel noise is added to logits where experts are chosen, in training (DeepSpeed's "RSample").
        capacity: drops assignments; None keeps all.
        load: the convention of the auxiliary loss; see `load_loss`.

    Raises:
        ValueError: an unknown setting; in a call, sizes that do not fit.

    >>> routing = sl.nn.routers.top_k(2, renormalise="chosen")(torch.tensor([[1.0, 3.0, 3.0]]))
    >>> routing.experts.tolist(), routing.weights.tolist()
    ([[1, 2]], [[0.5, 0.5]])
    """
    return TopK(
        k=k,
        score=score,
        renormalise=renormalise,
        scale=scale,
        groups=groups,
        kept_groups=kept_groups,
        sampled=sampled,
        capacity=capacity,
        load=load,
    )
