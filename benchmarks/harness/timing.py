"""Interleaved timing on CPUs and GPUs, and statistics of paired samples."""

from __future__ import annotations

import functools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

Times = dict[str, list[float]]  # name -> seconds per call, one entry per round
Calls = Mapping[str, Callable[[int], Any]]  # each is given the number of the round
Stopwatch = Callable[[Callable[[], Any]], float]


def wall(call: Callable[[], Any]) -> float:
    """Seconds that ``call`` takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def processor(call: Callable[[], Any]) -> float:
    """Seconds of processor time of one thread; time in which others had the processor does not count."""
    start = time.process_time()
    call()
    return time.process_time() - start


def events(call: Callable[[], Any]) -> float:
    """Seconds between two events on the current CUDA device.

    The device is busy first, for a millisecond or two in which the host runs ahead, so that the launches of a short call are
    not counted.
    """
    _ahead() @ _ahead()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3


@functools.cache
def _ahead() -> torch.Tensor:
    return torch.ones(8192, 8192, dtype=torch.bfloat16, device="cuda")


def interleave(
    calls: Calls,
    rounds: int,
    *,
    warm: int = 0,
    barrier: Callable[[], Any] = lambda: None,
    stopwatch: Stopwatch = wall,
) -> Times:
    """Times every call once per round, in an order that rotates, between barriers; ``warm`` rounds at first are not kept.

    Other load of the machine in a round affects all calls, so ratios within a round are comparable.
    """
    names = list(calls)
    times: Times = {name: [] for name in names}
    for number in range(warm + rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:

            def turn(name: str = name, number: int = number) -> None:
                calls[name](number)
                barrier()

            barrier()
            times[name].append(stopwatch(turn))
    return {name: seconds[warm:] for name, seconds in times.items()}


def medians(times: Times) -> dict[str, float]:
    """Name -> median of its seconds."""
    return {name: statistics.median(seconds) for name, seconds in times.items()}


class Ratio(NamedTuple):
    """The median of paired ratios, with its bootstrap 95% interval."""

    median: float
    low: float
    high: float


def ratio(times: list[float], reference: list[float], draws: int = 2000) -> Ratio:
    """``times / reference``, round by round."""
    ratios = [mine / theirs for mine, theirs in zip(times, reference, strict=True)]
    dice = random.Random(0)
    drawn = sorted(statistics.median(dice.choices(ratios, k=len(ratios))) for _ in range(draws))
    return Ratio(statistics.median(ratios), drawn[int(0.025 * draws)], drawn[int(0.975 * draws)])


@contextmanager
def one_thread() -> Iterator[None]:
    """A context in which torch computes with one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
