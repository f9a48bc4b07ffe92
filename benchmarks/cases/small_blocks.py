"""Steps of a model of 200 tiny blocks on two ranks: with neighbours merged, without, and against plain data parallelism."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import optree
import torch
import torch.distributed as dist

import shardlib as sl
from benchmarks.cases.ranks import AGREE, WARM, on_two_ranks
from benchmarks.harness import tables
from benchmarks.harness.case import CPU, Case, Result, Row, Setting
from benchmarks.harness.timing import Times, interleave, processor
from benchmarks.peers.provider import ADAMW, Step
from benchmarks.peers.shardlib import step_of
from shardlib.common.thresholds import Threshold
from shardlib.plan import bucketing

_BLOCKS, _LINEARS, _WIDTH, _ROWS = 200, 5, 8, 16
_PLAIN = "plain data parallelism"

Blocks = list[dict[str, dict[str, torch.Tensor]]]


class _Target(NamedTuple):
    """The largest ratios of a stage's steps that we aim for: of wall time over its own with units as they are, and of
    processor time over plain data parallelism's."""

    wall: float | None
    processor: float | None


_TARGETS = {1: _Target(None, None), 3: _Target(0.35, 2.0)}
_COMPILED = "stage 3, compiled"
_AIM = _Target(0.15, 1.2)  # of the compiled step


def measure(setting: Setting) -> Result:
    blocks = 4 if setting.small else _BLOCKS
    wall, used = on_two_ranks(_rank, blocks, setting.rounds, axis="data")[0]
    rows, times = list[Row](), Times()
    for name, seconds in wall.items():
        times[f"{name}, wall"], times[f"{name}, processor"] = seconds, used[name]
    for stage, target in _TARGETS.items():
        mine, apart = (f"{name}, wall" for name in _names(stage))
        rows.append(tables.row(times, mine, apart, target.wall))
        mine = f"{_names(stage)[0]}, processor"
        rows.append(tables.row(times, mine, f"{_PLAIN}, processor", target.processor))
    apart = _names(3)[1]
    rows.append(tables.row(times, f"{_COMPILED}, wall", f"{apart}, wall", _AIM.wall))
    rows.append(tables.row(times, f"{_COMPILED}, processor", f"{_PLAIN}, processor", _AIM.processor))
    size = 4 * blocks * _LINEARS * (_WIDTH + 1) * _WIDTH
    about = (
        f"{blocks} blocks of {_LINEARS} linear layers of {_WIDTH} × {_WIDTH} ({size / 1e3:.0f} kB of parameters, fp32), "
        f"{_ROWS} rows a rank, AdamW, two gloo ranks of one thread, {setting.rounds} rounds. “Apart”: every block is a unit, "
        "as it is where none is small enough to be merged with its neighbours. “Compiled”: "
        "`make_train_step(compile=True)`. “Plain data parallelism” is a hand-written "
        "loop: one all-reduce of all gradients, and torch's fused AdamW. Losses of all agree."
    )
    return tables.compared("200 tiny blocks", about, rows, times)


def _names(stage: int) -> tuple[str, str]:
    return f"stage {stage}", f"stage {stage}, apart"


def _rank(mesh: sl.Mesh, blocks: int, rounds: int) -> tuple[Times, Times]:
    """Wall and processor seconds of every side's steps."""
    torch.set_num_threads(1)
    steps: dict[str, Step] = {_PLAIN: _plain(_params(blocks))}
    for stage in _TARGETS:
        merged, apart = _names(stage)
        steps[merged] = step_of(_loss, sl.shard(_params(blocks), mesh, stage=stage))
        with mock.patch.object(bucketing, "MERGED", Threshold(0)):
            steps[apart] = step_of(_loss, sl.shard(_params(blocks), mesh, stage=stage))
    steps[_COMPILED] = step_of(_loss, sl.shard(_params(blocks), mesh, stage=3), compile=True)
    for number in range(WARM):
        batch = _batch(mesh, number)
        losses = {name: step(batch) for name, step in steps.items()}
        if max(losses.values()) - min(losses.values()) > AGREE:
            raise AssertionError(f"the sides train differently: losses {losses} in step {number}")
    calls: dict[str, Callable[[int], Any]] = {
        name: lambda number, step=step: step(_batch(mesh, WARM + number)) for name, step in steps.items()
    }
    wall = interleave(calls, rounds, barrier=dist.barrier)
    return wall, interleave(calls, rounds, barrier=dist.barrier, stopwatch=processor)


def _batch(mesh: sl.Mesh, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number * mesh.size + mesh.rank)
    return torch.randn(_ROWS, _WIDTH, generator=generator)


def _params(blocks: int) -> Blocks:
    generator = torch.Generator().manual_seed(0)

    def linear() -> dict[str, torch.Tensor]:
        weight = torch.eye(_WIDTH) + 0.1 * torch.randn(_WIDTH, _WIDTH, generator=generator)
        return {"weight": weight, "bias": torch.zeros(_WIDTH)}

    return [{f"linear{number}": linear() for number in range(_LINEARS)} for _ in range(blocks)]


@sl.block
def _block(params: Any, x: torch.Tensor) -> torch.Tensor:
    for linear in params.values():
        x = torch.tanh(torch.nn.functional.linear(x, linear["weight"], linear["bias"]))
    return x


def _loss(params: Any, x: torch.Tensor) -> torch.Tensor:
    for block in params:
        x = _block(block, x)
    return x.square().mean()


def _plain(params: Any) -> Step:
    leaves = [leaf.requires_grad_() for leaf in optree.tree_leaves(params)]
    optimizer = torch.optim.AdamW(leaves, fused=True, **ADAMW)

    def step(x: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = _loss(params, x)
        loss.backward()
        grads = [leaf.grad for leaf in leaves if leaf.grad is not None]
        message = torch.cat([*(grad.reshape(-1) for grad in grads), loss.detach().reshape(1)])
        dist.all_reduce(message)
        message /= dist.get_world_size()
        *parts, mean = message.split([*(grad.numel() for grad in grads), 1])
        torch._foreach_copy_(grads, [part.view_as(grad) for part, grad in zip(parts, grads, strict=True)])
        optimizer.step()
        return mean.item()

    return step


CASE = Case(
    "small_blocks", "a model of 200 tiny blocks on two ranks, with and without merging them", {CPU: 25}, measure
)
