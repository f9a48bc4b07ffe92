"""Step time against peers: every provider lives in the same two processes and they take turns, step by step."""

from __future__ import annotations

import statistics

import torch
import torch.distributed as dist

import shardlib as sl
from benchmarks.cases.ranks import AGREE, on_two_ranks
from benchmarks.harness import tables
from benchmarks.harness.case import CPU, Case, Result, Setting
from benchmarks.harness.timing import Times, interleave
from benchmarks.peers.gpt import SMALL, Config, random_batch
from benchmarks.peers.provider import Batch
from benchmarks.peers.shardlib import all_providers

# what, against what, largest ratio we aim for
_CONTROL = "DDP again"
_TARGETS = [
    (_CONTROL, "DDP", 1.02),
    ("shardlib stage 0", "DDP", 1.02),
    ("shardlib stage 1", "DDP + ZeroRedundancyOptimizer", 0.95),
    ("shardlib stage 2", "fully_shard without resharding", 0.85),
    ("shardlib stage 3", "fully_shard", 0.75),
    ("shardlib stage 3", "DeepSpeed stage 3", 0.75),
    ("shardlib stage 2", "DeepSpeed stage 2", None),
    ("shardlib stage 1", "DeepSpeed stage 1", None),
]
_WARM = 4  # steps before the clock runs, in which all must train alike


def measure(setting: Setting) -> Result:
    """Two ranks, one thread each."""
    config = SMALL if setting.small else Config()
    results = on_two_ranks(_rank, config, setting.rounds, axis="data")
    times = results[0][0]
    _check_losses([losses for _, losses in results])
    rows = [
        tables.row(times, name, reference, target, lowest=0.98 if name == _CONTROL else None)
        for name, reference, target in _TARGETS
    ]
    about = (
        f"One training step of a GPT ({config.layers} layers, width {config.width}, vocabulary {config.vocab}, sequence "
        f"{config.sequence}, batch {config.batch} per rank), fp32, AdamW without clipping, two gloo ranks of one thread. "
        f"{setting.rounds} rounds; within a round every provider takes one step, in an order that rotates. In the first "
        f"{_WARM} steps, not timed, all losses agreed within {AGREE:g}."
    )
    settings = {provider.name: provider.setting for provider in all_providers()}
    return tables.compared("Step time against peers", about, rows, times, settings)


def _rank(mesh: sl.Mesh, config: Config, rounds: int) -> tuple[Times, dict[str, list[float]]]:
    torch.set_num_threads(1)
    steps = {provider.name: provider.make(config) for provider in all_providers()}
    assert torch.nn.functional.linear is torch._C._nn.linear, "a provider has replaced torch's functions for all"
    losses = {name: [step(_batch(config, mesh, n)) for n in range(_WARM)] for name, step in steps.items()}
    calls = {name: lambda number, step=step: step(_batch(config, mesh, _WARM + number)) for name, step in steps.items()}
    return interleave(calls, rounds, barrier=dist.barrier), losses


def _batch(config: Config, mesh: sl.Mesh, number: int) -> Batch:
    return random_batch(config, number * mesh.size + mesh.rank)


def _check_losses(ranks: list[dict[str, list[float]]]) -> None:
    """Raises unless the losses of all providers agree, as means over ranks (peers report one rank's loss)."""
    means = {name: [statistics.fmean(step) for step in zip(*(losses[name] for losses in ranks))] for name in ranks[0]}
    expected = means["DDP"]
    for name, found in means.items():
        worst = max(abs(a - b) for a, b in zip(found, expected))
        if worst > AGREE:
            raise AssertionError(f"{name} trains differently from DDP: losses differ by {worst:g}")


CASE = Case("step", "a GPT's training step against DDP, ZeRO-1, fully_shard and DeepSpeed", {CPU: 20}, measure)
