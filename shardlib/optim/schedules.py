"""Learning-rate schedules: functions of the step (a 0-d tensor counting from 0) to a 0-d tensor."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

Schedule = Callable[[torch.Tensor], torch.Tensor]


def constant(value: float) -> Schedule:
    """``value`` at every step."""
    return lambda step: torch.full_like(step, value, dtype=torch.float64)


def linear(peak: float, steps: int, *, warmup: int = 0, end: float = 0.0) -> Schedule:
    """From 0 linearly to ``peak`` over ``warmup`` steps, then linearly to ``end`` at step ``steps``, then flat."""
    return _warm(peak, steps, warmup, lambda progress: peak + (end - peak) * progress)


def cosine(peak: float, steps: int, *, warmup: int = 0, end: float = 0.0) -> Schedule:
    """From 0 linearly to ``peak`` over ``warmup`` steps, then half a cosine to ``end`` at ``steps``, then flat."""
    return _warm(peak, steps, warmup, lambda p: end + (peak - end) * 0.5 * (1 + torch.cos(math.pi * p)))


def as_schedule(lr: float | Schedule) -> Schedule:
    return lr if callable(lr) else constant(lr)


def _warm(peak: float, steps: int, warmup: int, decay: Schedule) -> Schedule:
    if not 0 <= warmup < steps:
        raise ValueError(f"a schedule of {steps} steps cannot warm up for {warmup}; 0 <= warmup < steps")

    def schedule(step: torch.Tensor) -> torch.Tensor:
        step = step.to(torch.float64)
        progress = ((step - warmup) / (steps - warmup)).clamp(0.0, 1.0)
        return torch.where(step < warmup, peak * step / max(warmup, 1), decay(progress))

    return schedule
