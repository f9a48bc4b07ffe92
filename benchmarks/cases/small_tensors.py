"""The library's own cost: a model of 2,000 small tensors, one rank, against a hand-written loop."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

import shardlib as sl
from benchmarks.harness import tables
from benchmarks.harness.case import CPU, Case, Result, Setting
from benchmarks.harness.timing import one_thread
from benchmarks.peers.provider import ADAMW, Step
from benchmarks.peers.shardlib import echo_mesh, step_of
from shardlib.execute import gradients, units

_TENSORS, _WIDTH = 2000, 16
_LOOP, _PLAIN, _HANDLES, _ECHO = (
    "hand-written loop",
    "train_step",
    "handles, nothing exchanged",
    "handles, stage 3 on an echo",
)
_TARGETS = {_PLAIN: 1.1, _HANDLES: 1.3, _ECHO: None}

Params = dict[str, torch.Tensor]


def measure(setting: Setting) -> Result:
    tensors = 20 if setting.small else _TENSORS
    x = torch.randn(8, _WIDTH, generator=torch.Generator().manual_seed(1))
    alone, echo = (echo_mesh(ranks, setting.device) for ranks in (1, 2))
    with one_thread():
        steps = {
            _LOOP: _hand_written(_params(tensors)),
            _PLAIN: step_of(_loss, sl.shard(_params(tensors), alone)),
            _HANDLES: _exchanging_nothing(step_of(_loss, _with_handles(sl.shard(_params(tensors), alone)))),
            _ECHO: step_of(_loss, sl.shard(_params(tensors), echo, stage=3)),
        }
        times = setting.time({name: lambda _, step=step: step(x) for name, step in steps.items()}, warm=5)
    rows = [tables.row(times, name, _LOOP, target) for name, target in _TARGETS.items()]
    about = (
        f"{tensors} matrices of {_WIDTH} × {_WIDTH} in one unit, applied one after the other, AdamW (fused in the loop "
        f"too), one process of one thread, {setting.rounds} rounds. “Nothing exchanged”: every leaf is a handle and the unit "
        "is gathered and reduced as at stage 3, with stand-ins that hand the buffer on. “On an echo”: stage 3 on a mesh of "
        "two whose second rank echoes the first: every gather and reduction is made by copying, nothing is sent, and the "
        "optimizer has half of the elements."
    )
    return tables.compared("2,000 small tensors", about, rows, times)


def _params(tensors: int) -> Params:
    generator = torch.Generator().manual_seed(0)

    def weight() -> torch.Tensor:
        return torch.eye(_WIDTH) + 0.01 * torch.randn(_WIDTH, _WIDTH, generator=generator)

    return {f"w{index:04d}": weight() for index in range(tensors)}


def _loss(params: Params, x: torch.Tensor) -> torch.Tensor:
    for weight in params.values():
        x = torch.tanh(x @ weight)
    return x.square().mean()


def _hand_written(params: Params) -> Step:
    params = {name: weight.requires_grad_() for name, weight in params.items()}
    optimizer = torch.optim.AdamW(params.values(), fused=True, **ADAMW)

    def step(x: Any) -> float:
        optimizer.zero_grad()
        loss = _loss(params, x)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def _with_handles(params: sl.Sharded) -> sl.Sharded:
    """The step on a mesh of one, with leaves declared as split over its one rank, so that they become handles."""
    buckets = tuple(
        replace(bucket, axes=("data",), sizes=(1,), param_level=1, grad_level=1) for bucket in params.plan.buckets
    )
    return sl.Sharded(replace(params.plan, buckets=buckets), params.mesh, "param", params.buffers)


class _GatherNothing:
    """A gather on one rank, which returns its input."""

    def __init__(self, mesh: sl.Mesh, bucket: Any, buffer: torch.Tensor, *_: Any, **__: Any) -> None:
        self._buffer = buffer

    def wait(self) -> torch.Tensor:
        return self._buffer


class _ReduceNothing:
    """A reduction on one rank, which returns its input."""

    more = False

    def __init__(self, mesh: sl.Mesh, sums: Any, *_: Any) -> None:
        self._sums = sums

    def wait(self) -> Any:
        return self._sums


def _exchanging_nothing(step: Step) -> Step:
    def patched(x: Any) -> float:
        with patch.object(units, "Gather", _GatherNothing), patch.object(gradients, "Reduction", _ReduceNothing):
            return step(x)

    return patched


CASE = Case("small_tensors", "the library's own cost per tensor, against a hand-written loop", {CPU: 100}, measure)
