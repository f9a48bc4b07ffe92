"""A GPT on the bytes of Python's standard library: the final loss of a run, and many runs in parallel."""

from __future__ import annotations

import functools
import multiprocessing
import os
import statistics
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch

import shardlib as sl
from shardlib.data.bytes import batch_at, load_bytes, split, windows
from shardlib.models import gpt
from shardlib.models.gpt import GPTConfig


class Run(NamedTuple):
    """``batch`` is rows of ``config.sequence`` bytes over all ``ranks``, which are simulated."""

    config: GPTConfig
    batch: int
    steps: int
    optimizer: sl.optim.GradientTransformation
    transform: Any = sl.zero(0)
    ranks: int = 1

    def train(self, seed: int) -> float:
        """The final validation loss in nats per byte; the seed determines the initial model and the order of the text."""
        return self._losses(seed, halves=False)[0]

    def train_on_halves(self, seed: int) -> tuple[float, float]:
        """The final losses of `train` on two halves of the validation text: one to choose a rate by, one to report."""
        chosen_by, reported = self._losses(seed, halves=True)
        return chosen_by, reported

    def _losses(self, seed: int, halves: bool) -> list[float]:
        return sl.simulate(self._rank, seed, halves, mesh={"data": self.ranks})[0]

    def _rank(self, mesh: sl.Mesh, seed: int, halves: bool) -> list[float]:
        config, loss_fn = self.config, gpt.make_loss(self.config)
        text, validation = texts()
        params = sl.shard(gpt.init(config, seed=seed), mesh, self.transform)
        state, step = sl.make_train_step(loss_fn, params, self.optimizer)
        for number in range(self.steps):
            shares = {"rank": mesh.rank, "ranks": mesh.size}
            batch = batch_at(text, self.batch, config.sequence, seed=seed, step=number, **shares)
            state, _ = step(state, batch)
        evaluate = sl.make_eval_step(loss_fn, state.params)
        return [
            statistics.fmean(float(evaluate(state, batch)) for batch in windows(text, 64, config.sequence, limit=16))
            for text in (split(validation, 0.5) if halves else [validation])
        ]


@functools.cache
def texts() -> tuple[np.ndarray, np.ndarray]:
    """The bytes to train on, and those for validation; read once in a process."""
    return split(load_bytes())


def side_by_side(
    job: Callable[..., Any], arguments: Iterable[tuple[Any, ...]], processes: int | None = None
) -> Iterator[Any]:
    """Yields ``job(*each)`` for each of ``arguments``, in order; jobs run in as many processes as cores by default."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes or os.cpu_count(), spawn, torch.set_num_threads, (1,)) as pool:
        yield from pool.map(job, *zip(*arguments))
