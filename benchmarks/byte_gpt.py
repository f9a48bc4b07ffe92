"""A GPT on the bytes of Python's standard library: what a run of so many steps ends at, and many runs side by side."""

from __future__ import annotations

import functools
import multiprocessing
import os
import statistics
from collections.abc import Callable, Iterable
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
        """Final validation loss, in nats per byte; model and order of the text are the seed's."""
        return sl.simulate(self._rank, seed, mesh={"data": self.ranks})[0]

    def _rank(self, mesh: sl.Mesh, seed: int) -> float:
        config, loss_fn = self.config, gpt.make_loss(self.config)
        text, validation = _text()
        params = sl.shard(gpt.init(config, seed=seed), mesh, self.transform)
        state, step = sl.make_train_step(loss_fn, params, self.optimizer)
        for number in range(self.steps):
            shares = {"rank": mesh.rank, "ranks": mesh.size}
            batch = batch_at(text, self.batch, config.sequence, seed=seed, step=number, **shares)
            state, _ = step(state, batch)
        evaluate = sl.make_eval_step(loss_fn, state.params)
        return statistics.fmean(
            float(evaluate(state, batch)) for batch in windows(validation, 64, config.sequence, limit=16)
        )


@functools.cache
def _text() -> tuple[np.ndarray, np.ndarray]:
    return split(load_bytes())


def side_by_side(job: Callable[..., float], arguments: Iterable[tuple[Any, ...]]) -> list[float]:
    """``job(*each)`` of ``arguments``, in one process a core."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), spawn, torch.set_num_threads, (1,)) as pool:
        return list(pool.map(job, *zip(*arguments)))
