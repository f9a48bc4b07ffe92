"""The library's own cost: a model of 2,000 small tensors, one rank, against a hand-written loop."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

import shardlib as sl
from benchmarks.provider import ADAMW
from benchmarks.report import Row, Section
from benchmarks.timing import interleave, ratio
from shardlib.execute import gradients, units
from shardlib.mesh.transport import EchoGroup

Call = Callable[[int], float]

_TENSORS, _WIDTH = 2000, 16
_LOOP, _PLAIN, _HANDLES, _ECHO = (
    "hand-written loop",
    "train_step",
    "handles, nothing exchanged",
    "handles, stage 3 on an echo",
)
_TARGETS = {_PLAIN: 1.1, _HANDLES: 1.3, _ECHO: None}

Params = dict[str, torch.Tensor]


def measure(rounds: int) -> Section:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    x = torch.randn(8, _WIDTH, generator=torch.Generator().manual_seed(1))
    calls = {
        _LOOP: _hand_written(x),
        _PLAIN: _train_step(x, sl.shard(_params(), _mesh(1))),
        _HANDLES: _exchanging_nothing(_train_step(x, _with_handles(sl.shard(_params(), _mesh(1))))),
        _ECHO: _train_step(x, sl.shard(_params(), _mesh(2), stage=3)),
    }
    for _ in range(5):
        for call in calls.values():
            call(0)
    times = interleave(calls, rounds)
    torch.set_num_threads(threads)
    rows = []
    for name, target in _TARGETS.items():
        seconds = statistics.median(times[name]), statistics.median(times[_LOOP])
        rows.append(Row(name, _LOOP, target, ratio(times[name], times[_LOOP]), seconds))
    text = (
        f"{_TENSORS} matrices of {_WIDTH} × {_WIDTH} in one unit, applied one after the other, AdamW (fused in the loop "
        f"too), one process of one thread, {rounds} rounds. “Nothing exchanged”: every leaf is a handle and the unit is "
        "gathered and reduced as at stage 3, with stand-ins that hand the buffer on. “On an echo”: stage 3 on a mesh of "
        "two whose second rank echoes the first: every gather and reduction is made by copying, nothing is sent, and the "
        "optimizer has half of the elements."
    )
    return Section("2,000 small tensors", text, rows, times=times)


def _params() -> Params:
    generator = torch.Generator().manual_seed(0)

    def weight() -> torch.Tensor:
        return torch.eye(_WIDTH) + 0.01 * torch.randn(_WIDTH, _WIDTH, generator=generator)

    return {f"w{place:04d}": weight() for place in range(_TENSORS)}


def _loss(params: Params, x: torch.Tensor) -> torch.Tensor:
    for weight in params.values():
        x = torch.tanh(x @ weight)
    return x.square().mean()


def _hand_written(x: torch.Tensor) -> Call:
    params = {name: weight.requires_grad_() for name, weight in _params().items()}
    optimizer = torch.optim.AdamW(params.values(), fused=True, **ADAMW)

    def step(_: int) -> float:
        optimizer.zero_grad()
        loss = _loss(params, x)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def _mesh(ranks: int) -> sl.Mesh:
    return sl.Mesh({"data": ranks}, 0, {"data": EchoGroup(ranks)}, torch.device("cpu"))


def _train_step(x: torch.Tensor, params: sl.Sharded) -> Call:
    optimizer = sl.optim.adamw(ADAMW["lr"], *ADAMW["betas"], ADAMW["eps"], ADAMW["weight_decay"])
    state, train_step = sl.make_train_step(_loss, params, optimizer)

    def step(_: int) -> float:
        nonlocal state
        state, metrics = train_step(state, x)
        return metrics["loss"].item()

    return step


def _with_handles(params: sl.Sharded) -> sl.Sharded:
    """The same on a mesh of one, declared to be split over its one rank, so that leaves become handles."""
    buckets = tuple(
        replace(bucket, axes=("data",), sizes=(1,), param_level=1, grad_level=1) for bucket in params.plan.buckets
    )
    return sl.Sharded(replace(params.plan, buckets=buckets), params.mesh, "param", params.buffers)


class _GatherNothing:
    """Stands for a gather of one rank: what goes in comes out."""

    def __init__(self, mesh: sl.Mesh, bucket: Any, buffer: torch.Tensor, *_: Any, **__: Any) -> None:
        self._buffer = buffer

    def wait(self) -> torch.Tensor:
        return self._buffer


class _ReduceNothing:
    """The same for reductions."""

    def __init__(self, mesh: sl.Mesh, sums: Any, *_: Any) -> None:
        self._sums = sums

    def wait(self) -> Any:
        return self._sums


def _exchanging_nothing(call: Call) -> Call:
    def step(number: int) -> float:
        with patch.object(units, "Gather", _GatherNothing), patch.object(gradients, "Reduction", _ReduceNothing):
            return call(number)

    return step


if __name__ == "__main__":
    print(measure(60).markdown())
