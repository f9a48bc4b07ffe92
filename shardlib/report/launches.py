"""The measured time that an operator takes however small it is."""

from __future__ import annotations

import statistics
import time

import torch
import torch.nn.functional as F

from shardlib.execute.counting import WorkCount

_LAYERS = 64
_ROUNDS = 7


def measure_launches(device: torch.device | str = "cpu") -> float:
    """Operators per second that a device begins, forward and backward: ``bandwidth={"launches": ...}`` of `predict_step`.

    Of layers so small that their elements take no time, counted as traces count them. The median of some rounds, after a
    first one.

    >>> sl.report.measure_launches() > 0
    True
    """
    x = torch.ones(1, 8, device=device)
    weights = [torch.full((8, 8), 0.1, device=device, requires_grad=True) for _ in range(_LAYERS)]
    work = WorkCount()
    with work:
        _round(x, weights)
    seconds = [_round(x, weights) for _ in range(_ROUNDS + 1)][1:]
    return sum(work.launches) / statistics.median(seconds)


def _round(x: torch.Tensor, weights: list[torch.Tensor]) -> float:
    start = _now(x.device)
    for weight in weights:
        x = F.gelu(F.linear(x, weight))
    torch.autograd.grad(x.sum(), weights)
    return _now(x.device) - start


def _now(device: torch.device) -> float:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()
