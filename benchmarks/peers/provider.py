"""Providers of training steps to compare: a name, a setting in words, and a function that makes the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from benchmarks.peers.gpt import Config

Batch = tuple[torch.Tensor, torch.Tensor]  # tokens, targets: this rank's share
Step = Callable[[Any], float]  # one training step on a batch -> the loss

ADAMW: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}


class Provider(NamedTuple):
    name: str
    setting: str
    make: Callable[[Config], Step]


def loop(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """The step of a usual training loop."""

    def step(batch: Batch) -> float:
        optimizer.zero_grad()
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step
