"""Interleaved timing, and what paired samples say about a ratio."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

Times = dict[str, list[float]]  # name -> seconds per call, one entry per round


def interleave(
    calls: Mapping[str, Callable[[int], Any]],
    rounds: int,
    barrier: Callable[[], Any] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Times:
    """Call each once per round, in an order that rotates, between barriers.

    Whatever else the machine does in a round it does to all of them, so ratios within a round are comparable. With
    ``clock=time.process_time``, for what is of one thread, time that others had the processor does not count.
    """
    names = list(calls)
    times: Times = {name: [] for name in names}
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            barrier()
            start = clock()
            calls[name](number)
            barrier()
            times[name].append(clock() - start)
    return times


def transfers(payload: int, rounds: int) -> list[float]:
    """Seconds that each of ``rounds`` raw transfers takes: every rank sends ``payload`` bytes to the next one at once."""
    rank, size = dist.get_rank(), dist.get_world_size()
    out, into = torch.ones(payload // 4), torch.empty(payload // 4)
    seconds = []
    for _ in range(rounds + 1):  # the first one connects
        dist.barrier()
        start = time.perf_counter()
        for work in (dist.irecv(into, (rank - 1) % size), dist.isend(out, (rank + 1) % size)):
            work.wait()
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


class Ratio(NamedTuple):
    """The median of paired ratios, with its bootstrap 95% interval."""

    median: float
    low: float
    high: float


def ratio(times: list[float], reference: list[float], draws: int = 2000) -> Ratio:
    """``times / reference``, round by round."""
    ratios = [mine / theirs for mine, theirs in zip(times, reference, strict=True)]
    dice = random.Random(0)
    medians = sorted(statistics.median(dice.choices(ratios, k=len(ratios))) for _ in range(draws))
    return Ratio(statistics.median(ratios), medians[int(0.025 * draws)], medians[int(0.975 * draws)])
