"""`Router`: what the routers share, from logits to a `Routing`; auxiliary losses, and the bias that balances without one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from shardlib.common.environment import once
from shardlib.kernels import routing
from shardlib.nn.moe.routing import Capacity, Routing, Tokens, in_order, is_kept, tokens_of
from shardlib.rng import Key

CONVENTIONS = ("first", "mean", "sum")
RENORMALISED = (None, "chosen", "kept")


@dataclass(frozen=True, kw_only=True)
class Router(ABC):
    """A function ``router(logits, rng=None, balance=None, mask=None) -> Routing``. A router of one's own defines `choose`.

    Choices are made once: a recomputed block takes over those of its first run (`shardlib.remat`). Weights and losses are
    computed again, from the same choices, and gradients pass through them to the logits.

    Attributes:
        capacity: drops assignments; None keeps all.
        load: the convention of the auxiliary loss; see `load_loss`.

    Raises:
        ValueError: an unknown convention.
    """

    capacity: Capacity | None = None
    load: str = "mean"

    causal: ClassVar[bool] = True  # whether the experts of a token, without a capacity, depend on it alone

    def __post_init__(self) -> None:
        if self.load not in CONVENTIONS:
            raise ValueError(f"load={self.load!r}: use one of {', '.join(map(repr, CONVENTIONS))}")

    def __call__(
        self,
        logits: torch.Tensor,
        rng: Key | Tokens | None = None,
        balance: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
    ) -> Routing:
        """The routing by ``logits`` ``[T, E]``.

        Args:
            rng: a key for random choices; None in evaluation, where nothing is random.
            balance: ``[E]``, added to scores where experts are chosen, not to weights; see `balanced`.
            mask: ``[T]``, bool: the tokens to route. The others have weights of 0, and are in no count and no loss.

        Raises:
            ValueError: logits that are no matrix, fewer experts than choices, or a mask of another size.
        """
        if logits.dim() != 2:
            raise ValueError(f"a router takes logits [tokens, experts], not a tensor of shape {tuple(logits.shape)}")
        if mask is not None and mask.shape != logits.shape[:1]:
            raise ValueError(f"a router's mask has one element per token, {len(logits)}, not {tuple(mask.shape)}")
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        tokens = tokens_of(logits, rng) if isinstance(rng, Key) else rng
        scores = self.scores(logits)
        experts, counts, kept = once(lambda: self._decide(logits, scores, tokens, balance, mask))
        keeps = is_kept(kept, experts)
        probabilities = self.probabilities(scores)
        aux = {
            "load": load_loss(probabilities, experts, self.load, mask),
            "z": z_loss(logits, mask),
            "entropy": entropy(probabilities.detach(), mask),
            "dropped": self.dropped(keeps, counts, mask),
        }
        slots = self.slots(experts.shape, logits.shape[1])
        return Routing(experts, self.weights(logits, scores, experts, keeps), counts, kept, aux, slots)

    def _decide(
        self,
        logits: torch.Tensor,
        scores: torch.Tensor,
        tokens: Tokens | None,
        balance: torch.Tensor | None,
        mask: torch.Tensor | None,
    ) -> list[torch.Tensor]:
        """The experts, their counts, and the numbers of the assignments that are kept."""
        number = logits.shape[1]
        experts, wanted = self.choose(logits, tokens, balance)
        if mask is not None:
            wanted = wanted & mask[:, None]
        counts, positions = routing.by_expert(torch.where(wanted, experts, -1), number)
        if self.capacity is not None:
            keeps = self.capacity.keeps(experts, wanted, scores.gather(1, experts), number, tokens)
            _, positions = routing.by_expert(torch.where(keeps, experts, -1), number)
        return [experts, counts, in_order(positions, self.rows(experts.shape, number))]

    @abstractmethod
    def choose(
        self, logits: torch.Tensor, tokens: Tokens | None, balance: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The experts of each token, best first, and whether each of these choices is wanted, both ``[T, k]``."""
        ...

    @abstractmethod
    def weights(
        self, logits: torch.Tensor, scores: torch.Tensor, experts: torch.Tensor, keeps: torch.Tensor
    ) -> torch.Tensor:
        """``[T, k]``: the weights of the choices, 0 where one is not among those that its expert ``keeps``."""
        ...

    def scores(self, logits: torch.Tensor) -> torch.Tensor:
        """``[T, E]``: the scores of which weights are made."""
        return logits.softmax(1)

    def probabilities(self, scores: torch.Tensor) -> torch.Tensor:
        """``[T, E]``: the scores as the auxiliary loss takes them; rows sum to 1."""
        return scores

    def rows(self, shape: tuple[int, ...], number: int) -> int:
        """The most assignments that are kept, of choices of ``shape`` ``(T, k)`` among a ``number`` of experts."""
        taken, slots = shape[0] * shape[1], self.slots(shape, number)
        return taken if slots is None else min(taken, number * slots)

    def slots(self, shape: tuple[int, ...], number: int) -> int | None:
        """The most of them that one expert keeps; None where it may be all."""
        return None if self.capacity is None else self.capacity.of(shape[0], shape[1], number)

    def dropped(self, keeps: torch.Tensor, counts: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """The share of the wanted assignments that was dropped; 0 where none was wanted."""
        wanted = counts.sum()
        return (wanted - keeps.sum()) / wanted.clamp(min=1)


def best(scores: torch.Tensor, number: int) -> torch.Tensor:
    """``[T, number]``: the columns of the largest scores of each row, the largest first; of equals the first. Raises
    `ValueError` where there are fewer columns."""
    if not 0 < number <= scores.shape[1]:
        raise ValueError(f"a router cannot choose {number} of {scores.shape[1]} experts")
    return routing.top_k(scores, number)[0]


def require_renormalised(how: str | None) -> None:
    """Raise `ValueError` for an unknown way to renormalise."""
    if how not in RENORMALISED:
        raise ValueError(f"renormalise={how!r}: use None, 'chosen' or 'kept'")


def renormalised(how: str | None, chosen: torch.Tensor, keeps: torch.Tensor) -> torch.Tensor:
    """Weights of the scores of the experts that were ``chosen``.

    Args:
        how: None keeps scores; "chosen" divides by the sum over the token's choices, "kept" by the sum over those of them
            that were not dropped.
    """
    weights = torch.where(keeps, chosen, 0)
    if how is None:
        return weights
    total = (weights if how == "kept" else chosen).sum(1, keepdim=True)
    return weights / torch.where(total > 0, total, 1)


def load_loss(
    probabilities: torch.Tensor,
    experts: torch.Tensor,
    convention: str = "first",
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """``E · Σ_e f_e · P_e``: least where tokens are spread evenly; P_e is the mean probability of expert e.

    ==========  ======================================  ==========  ====================================================
    convention  f_e, before drops                       at balance  as in
    ==========  ======================================  ==========  ====================================================
    "first"     share of tokens whose first choice is   1           Switch (arXiv 2101.03961, (4)), GShard, DeepSpeed's
                e                                                   top-1 and top-2
    "mean"      share of assignments that go to e       1           DeepSpeed's top-k
    "sum"       assignments to e per token              k           transformers
    ==========  ======================================  ==========  ====================================================

    Args:
        probabilities: ``[T, E]``; each row sums to 1. Only they have a gradient.
        experts: ``[T, k]``, int64. To pool several layers as transformers does, concatenate their rows.
        mask: ``[T]``, bool: the tokens that count; by default all.

    Raises:
        ValueError: another convention.

    >>> even = torch.full((4, 4), 0.25)
    >>> experts = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0]])
    >>> [float(sl.nn.routers.load_loss(even, experts, convention)) for convention in ("first", "mean", "sum")]
    [1.0, 1.0, 2.0]
    """
    if convention not in CONVENTIONS:
        raise ValueError(f"load_loss: convention {convention!r} is none of {', '.join(map(repr, CONVENTIONS))}")
    count, number = probabilities.shape
    if convention == "first":
        experts = experts[:, :1]
    ones = torch.ones_like(experts, dtype=probabilities.dtype)
    total: int | torch.Tensor = max(count, 1)
    if mask is not None:
        ones, probabilities = ones * mask[:, None], probabilities * mask[:, None]
        total = mask.sum().clamp(min=1)
    assigned = probabilities.new_zeros(number).scatter_add(0, experts.flatten(), ones.flatten()) / total
    loss = number * (assigned * (probabilities.sum(0) / total)).sum()
    return loss / experts.shape[1] if convention == "mean" else loss


def z_loss(logits: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """The mean over tokens of ``logsumexp(logits)²``, which keeps logits ``[T, E]`` small (ST-MoE, arXiv 2202.08906, (5)).

    Args:
        mask: ``[T]``, bool: the tokens that count; by default all.

    >>> float(sl.nn.routers.z_loss(torch.zeros(3, 4)))  # (ln 4)²
    1.9218...
    """
    return _mean(logits.logsumexp(1).square(), mask)


def entropy(probabilities: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """The mean over tokens of the entropy of ``probabilities`` ``[T, E]``, in nats.

    Args:
        mask: ``[T]``, bool: the tokens that count; by default all.

    >>> float(sl.nn.routers.entropy(torch.full((3, 4), 0.25)))  # ln 4
    1.3862...
    """
    return _mean(torch.special.entr(probabilities).sum(1), mask)


def _mean(values: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """The mean of a value per token; 0 without tokens."""
    if mask is None:
        return values.sum() / max(values.shape[0], 1)
    return (values * mask).sum() / mask.sum().clamp(min=1)


def balanced(bias: torch.Tensor, counts: torch.Tensor, rate: float = 1e-3) -> torch.Tensor:
    """The bias of the next step, for balance without a loss: a new tensor (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).

    An expert with more assignments than the mean loses ``rate``, one with fewer gains it. Give it to `moe` as
    ``params["router"]["balance"]``; it decides who is chosen, and is no part of the weights.

    Args:
        bias: ``[E]``, floating-point.
        counts: ``[E]``: assignments of the last step, summed over its micro-batches and ranks; or their mean, in float64,
            as metrics have it.

    >>> sl.nn.routers.balanced(torch.zeros(3), torch.tensor([6, 3, 0]), rate=0.5).tolist()
    [-0.5, 0.0, 0.5]
    """
    # Sums in place of a mean, which could miss the equality of a whole number with it. Of numbers that are no whole ones
    # the difference is rounded, by no more than E times the sum's last place.
    lacking = counts.sum() - counts * len(counts)
    if counts.is_floating_point():
        rounding = len(counts) * torch.finfo(counts.dtype).eps * counts.sum()
        lacking = torch.where(lacking.abs() <= rounding, 0, lacking)
    return bias + rate * torch.sign(lacking).to(bias.dtype)
