"""The k experts with the largest scores for each token, and a stable counting sort of what is assigned, in one pass.

Token t of T is assigned to the experts e_t0, e_t1, …, by falling score, where of equal scores the lower index comes first
(NaN before all numbers, and −0 equals 0). Assignment (t, j) has the number a = t·k + j, and

- counts_e = |{a : e_a = e}|;
- position_a = Σ_{f < e_a} counts_f + |{b < a : e_b = e_a}|: its row once all are sorted by expert, stably. An assignment to
  no expert (a number outside of [0, E)) has the position −1 and is not counted.

Scores are ``[T, E]`` in fp32, bf16 or fp16 (float64 by plain torch). Bytes moved: the scores, 16 for an assignment, and 8
that are read again; plain torch sorts twice. Operations: a comparison for each score, and k more where it is among the k
largest so far. Nothing has gradients: weights are ``scores.gather(-1, experts)``.
"""

from __future__ import annotations

import torch

from shardlib.common.thresholds import threads
from shardlib.kernels.common import native, rows
from shardlib.kernels.common.arguments import check_tensors
from shardlib.kernels.common.dispatch import Plain, on, serving
from shardlib.kernels.common.operators import opaque

__all__ = ["by_expert", "top_k"]

IMPLEMENTATIONS: dict[str, tuple[str, ...]] = {"cpu": ("cpu",), "cuda": ("triton",)}


def top_k(scores: torch.Tensor, k: int, *, using: str | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The ``k`` best experts of each token, by falling score, and their order by expert.

    Args:
        scores: ``[T, E]``.

    Returns:
        experts ``[T, k]``, counts ``[E]`` and positions ``[T, k]``, all int64.

    Raises:
        ValueError: ``scores`` is no matrix, or ``k`` is outside of 1 to E.

    >>> from shardlib.kernels.routing import top_k
    >>> experts, counts, positions = top_k(torch.tensor([[0.1, 0.7, 0.2], [0.5, 0.0, 0.5]]), 2)
    >>> experts.tolist(), counts.tolist(), positions.tolist()
    ([[1, 2], [0, 2]], [1, 1, 2], [[1, 2], [0, 3]])
    """
    check_tensors("top_k", {"scores": scores})
    if scores.dim() != 2 or not 1 <= k <= scores.shape[1]:
        raise ValueError(
            f"scores {tuple(scores.shape)} and k {k}: scores must be [tokens, experts], and k in 1 to experts"
        )
    experts, counts, positions = _top_k(scores.detach(), k, using)
    return experts, counts, positions


def by_expert(experts: torch.Tensor, count: int, *, using: str | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The order of assignments by expert, of any routing.

    Args:
        experts: int64, of any shape: the expert of each assignment; a number outside of [0, count) is none.
        count: of the experts.

    Returns:
        counts int64 ``[count]``, and positions int64 of the shape of ``experts``.

    >>> from shardlib.kernels.routing import by_expert
    >>> by_expert(torch.tensor([[2, 0], [-1, 2]]), 3)  # one assignment was dropped
    (tensor([1, 0, 2]), tensor([[ 1,  0],
            [-1,  2]]))
    """
    check_tensors("by_expert", {"experts": experts}, exactly={"experts": torch.int64})
    if count < 1:
        raise ValueError(f"count is {count}: there must be an expert")
    counts, positions = _by_expert(experts, count, using)
    return counts, positions


def _best(scores: torch.Tensor, k: int, using: str | None) -> list[torch.Tensor]:
    with on(scores.device):
        return serving("routing", scores, using).top_k(scores, k)


def _sorted(experts: torch.Tensor, count: int, using: str | None) -> list[torch.Tensor]:
    with on(experts.device):
        return serving("routing", experts, using).by_expert(experts, count)


def _best_fake(scores: torch.Tensor, k: int, using: str | None) -> list[torch.Tensor]:
    return [
        scores.new_empty(size, dtype=torch.int64)
        for size in ((scores.shape[0], k), scores.shape[1:], (scores.shape[0], k))
    ]


def _sorted_fake(experts: torch.Tensor, count: int, using: str | None) -> list[torch.Tensor]:
    return [experts.new_empty(count), experts.new_empty(experts.shape)]


_top_k = opaque("routing_top_k", _best, _best_fake)


_by_expert = opaque("routing_by_expert", _sorted, _sorted_fake)


class reference(Plain):
    """In plain torch."""

    @staticmethod
    def top_k(scores: torch.Tensor, k: int) -> list[torch.Tensor]:
        experts = scores.sort(dim=-1, descending=True, stable=True).indices[:, :k].contiguous()
        return [experts, *reference.by_expert(experts, scores.shape[1])]

    @staticmethod
    def by_expert(experts: torch.Tensor, count: int) -> list[torch.Tensor]:
        none = (experts < 0) | (experts >= count)
        flat = experts.masked_fill(none, count).flatten()
        counts = flat.new_zeros(count + 1).scatter_add_(0, flat, torch.ones_like(flat))
        order = flat.sort(stable=True).indices
        positions = torch.empty_like(flat).scatter_(0, order, torch.arange(len(flat), device=flat.device))
        return [counts[:count].clone(), positions.view(experts.shape).masked_fill(none, -1)]


class cpu(native.Compiled, routing_top_k="pilllppppi", routing_by_expert="pllpppi"):
    """By routing.cpp."""

    @staticmethod
    def top_k(scores: torch.Tensor, k: int) -> list[torch.Tensor]:
        scores = scores.contiguous()
        tokens, count = scores.shape
        experts, counts, positions = (_empty(*size) for size in ((tokens, k), (count,), (tokens, k)))
        where = (experts, counts, positions, _ranges(count), threads())
        cpu.library().routing_top_k(scores, native.DTYPES[scores.dtype], tokens, count, k, *where)
        return [experts, counts, positions]

    @staticmethod
    def by_expert(experts: torch.Tensor, count: int) -> list[torch.Tensor]:
        experts = experts.contiguous()
        counts, positions = _empty(count), _empty(*experts.shape)
        cpu.library().routing_by_expert(experts, experts.numel(), count, counts, positions, _ranges(count), threads())
        return [counts, positions]


def _empty(*size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.int64)


def _ranges(count: int) -> torch.Tensor:
    """Room for the counts of each range of tokens."""
    return _empty(rows.RANGES, count)
