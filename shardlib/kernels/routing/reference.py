"""Routing in plain torch."""

from __future__ import annotations

import torch


def load(device: torch.device) -> str:
    return "reference"


def top_k(scores: torch.Tensor, k: int) -> list[torch.Tensor]:
    experts = scores.sort(dim=-1, descending=True, stable=True).indices[:, :k].contiguous()
    return [experts, *by_expert(experts, scores.shape[1])]


def by_expert(experts: torch.Tensor, count: int) -> list[torch.Tensor]:
    none = (experts < 0) | (experts >= count)
    flat = experts.masked_fill(none, count).flatten()
    counts = flat.new_zeros(count + 1).scatter_add_(0, flat, torch.ones_like(flat))
    order = flat.sort(stable=True).indices
    positions = torch.empty_like(flat).scatter_(0, order, torch.arange(len(flat), device=flat.device))
    return [counts[:count].clone(), positions.view(experts.shape).masked_fill(none, -1)]
