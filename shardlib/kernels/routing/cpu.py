"""Routing on the CPU, by routing.cpp."""

from __future__ import annotations

from typing import Any

import torch

from shardlib.common.thresholds import threads
from shardlib.kernels.common import native, rows

_SIGNATURES = {"routing_top_k": "pilllppppi", "routing_by_expert": "pllpppi"}


def load(device: torch.device) -> str:
    return native.description("routing")


def top_k(scores: torch.Tensor, k: int) -> list[torch.Tensor]:
    scores = scores.contiguous()
    tokens, count = scores.shape
    experts, counts, positions = (_empty(*size) for size in ((tokens, k), (count,), (tokens, k)))
    where = (experts, counts, positions, _ranges(count), threads())
    _library().routing_top_k(scores, native.DTYPES[scores.dtype], tokens, count, k, *where)
    return [experts, counts, positions]


def by_expert(experts: torch.Tensor, count: int) -> list[torch.Tensor]:
    experts = experts.contiguous()
    counts, positions = _empty(count), _empty(*experts.shape)
    _library().routing_by_expert(experts, experts.numel(), count, counts, positions, _ranges(count), threads())
    return [counts, positions]


def _empty(*size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.int64)


def _ranges(count: int) -> torch.Tensor:
    """Room for the counts of each range of tokens."""
    return _empty(rows.RANGES, count)


def _library() -> Any:
    return native.cpp_functions("routing", _SIGNATURES)
