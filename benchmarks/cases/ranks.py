"""Training steps on two ranks of one thread each; the compared sides take turns in the same two processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import shardlib as sl
from benchmarks.harness import tables
from benchmarks.harness.case import Row
from benchmarks.harness.timing import Times, interleave
from benchmarks.peers.gpt import Config, random_batch
from benchmarks.peers.provider import Step

AGREE = 1e-4  # how much the losses of steps that train alike may differ
WARM = 3  # steps before the clock runs, in which all must train alike


class Side(NamedTuple):
    """One side of a comparison, and its setting in words."""

    name: str
    setting: str
    make: Callable[[Config, sl.Mesh], Step]


def on_two_ranks(fn: Callable[..., Any], *arguments: Any, axis: str) -> list[Any]:
    """The results of ``fn(mesh, *arguments)`` on each rank."""
    os.environ["OMP_NUM_THREADS"] = "1"
    return sl.launch(fn, *arguments, mesh={axis: 2}, timeout=1800)


def versus(
    first: Side, second: Side, axis: str, targets: Mapping[Config, float], rounds: int
) -> tuple[list[Row], Times]:
    """Times of two sides' steps at each configuration; configurations differ in width."""
    rows, times = [], Times()
    for config, target in targets.items():
        measured = on_two_ranks(_rank, (first, second), config, rounds, axis=axis)[0]
        names = [f"{side.name}, width {config.width}" for side in (first, second)]
        times |= dict(zip(names, measured))
        rows.append(tables.row(times, *names, target))
    return rows, times


def _rank(mesh: sl.Mesh, sides: tuple[Side, Side], config: Config, rounds: int) -> list[list[float]]:
    torch.set_num_threads(1)
    steps = [side.make(config, mesh) for side in sides]
    for number in range(WARM):
        first, second = (step(random_batch(config, number)) for step in steps)
        # The last rank has the loss, also with a pipeline.
        if mesh.rank == mesh.size - 1 and abs(first - second) > AGREE:
            raise AssertionError(f"the two train differently: losses {first} and {second} in step {number}")
    calls = {
        side.name: lambda number, step=step: step(random_batch(config, WARM + number))
        for side, step in zip(sides, steps)
    }
    return list(interleave(calls, rounds, barrier=dist.barrier).values())
