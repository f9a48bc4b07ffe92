"""Auxiliary losses of routers, and the bias that balances loads without one."""

from __future__ import annotations

import torch

CONVENTIONS = ("first", "mean", "sum")


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
