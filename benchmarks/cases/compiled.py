"""Steps as one graph, with inductor and without, against steps without a graph; and how long compiling them takes."""

from __future__ import annotations

import os
import re
import tempfile
from typing import Any
from unittest import mock

import torch

import shardlib as sl
from benchmarks.harness import tables
from benchmarks.harness.case import CPU, Case, Result, Setting
from benchmarks.harness.timing import interleave, processor
from benchmarks.peers.gpt import GPT, SMALL, Config, params_of
from benchmarks.peers.gpt import make_loss as make_plain_loss
from benchmarks.peers.shardlib import adamw
from shardlib.models import gpt

_OURS, _PLAIN = "the library's GPT", "a GPT of torch's operations"
_WAYS: dict[str, Any] = {"without a graph": False, "graph": True, "graph, inductor": "inductor"}
_TARGET = 0.92  # of a compiled step's time over that of the step without a graph
_AGREE = 1e-4


def measure(setting: Setting) -> Result:
    """Steps on one device in turns, by processor time; inductor begins with an empty cache on disk, and finds it full in the
    end."""
    torch.set_num_threads(1)
    config = SMALL if setting.small else Config()
    ours = gpt.GPTConfig(config.vocab, config.layers, config.width, config.heads, config.sequence)
    drawn = torch.randint(config.vocab, (config.batch, config.sequence + 1), generator=torch.Generator().manual_seed(0))
    tokens, targets = drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()
    torch.manual_seed(0)
    models = {
        _OURS: (gpt.make_loss(ours), gpt.init(ours), {"tokens": tokens, "targets": targets}),
        _PLAIN: (make_plain_loss(config, sl.block), params_of(GPT(config)), (tokens, targets)),
    }
    rows, times, seconds = list[tables.Row](), dict[str, list[float]](), list[list[str]]()
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder):
        for name, (loss_fn, params, batch) in models.items():
            steps = {way: _Step(loss_fn, params, compile) for way, compile in _WAYS.items()}
            losses = [[step(batch) for step in steps.values()] for _ in range(2)]
            if any(max(each) - min(each) > _AGREE for each in losses):
                raise AssertionError(f"{name}: the ways train differently: losses {losses}")
            again = _Step(loss_fn, params, "inductor")
            again(batch)
            taken = (steps["graph"], steps["graph, inductor"], again)
            seconds.append([name, *(f"{step.compiling():.2f}" for step in taken)])
            found = interleave(
                {way: lambda _, step=step, batch=batch: step(batch) for way, step in steps.items()},
                setting.rounds,
                stopwatch=processor,
            )
            times |= {f"{name}, {way}": each for way, each in found.items()}
            whole = f"{name}, without a graph"
            rows.append(tables.row(times, f"{name}, graph", whole))
            rows.append(tables.row(times, f"{name}, graph, inductor", whole, _TARGET))
    about = (
        f"{config.layers} layers, width {config.width}, {config.batch} rows of {config.sequence} tokens, fp32, AdamW, "
        f"stage 3 on one rank and one thread, processor time, {setting.rounds} rounds. Attention, norms and activations of "
        "the library's GPT are its own kernels, which inductor leaves as they are. Below: wall seconds to make the graph, "
        "and with inductor's code, as `print(train_step.graph)` tells them: with nothing on disk (the first model's include "
        "torch's imports of inductor), and with its code there."
    )
    timed = tables.compared("Steps as one graph", about, rows, times)
    grid = tables.grid(["seconds to compile", "graph", "inductor, cold", "inductor, warm"], seconds)
    return Result("\n".join([timed.text, *grid]) + "\n", timed.header, timed.samples, timed.rows)


class _Step:
    """A step of a model at stage 3.

    Args:
        compile: as of `sl.make_train_step`.
    """

    def __init__(self, loss_fn: Any, params: Any, compile: Any) -> None:
        sharded = sl.shard(params, sl.make_mesh(), stage=3)
        self._state, self._train = sl.make_train_step(loss_fn, sharded, adamw(), compile=compile)

    def __call__(self, batch: Any) -> float:
        self._state, metrics = self._train(self._state, batch)
        return float(metrics["loss"])

    def compiling(self) -> float:
        """Seconds that the graph took."""
        found = re.search(r"compiled in ([\d.]+) s", str(self._train.graph))  # type: ignore[attr-defined]
        assert found is not None
        return float(found[1])


CASE = Case("compiled", "steps as one graph, with inductor and without", {CPU: 15}, measure)
