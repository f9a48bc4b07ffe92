"""Step time against peers: every provider lives in the same two processes and they take turns, step by step."""

from __future__ import annotations

import os
import statistics

import torch
import torch.distributed as dist

import shardlib as sl
from benchmarks.model import Config, random_batch
from benchmarks.provider import Step
from benchmarks.providers import all_providers
from benchmarks.report import Row, Section
from benchmarks.timing import Times, interleave, ratio

# what, against what, largest ratio we aim for
CONTROL = "DDP again"
TARGETS = [
    (CONTROL, "DDP", 1.02),
    ("shardlib stage 0", "DDP", 1.02),
    ("shardlib stage 1", "DDP + ZeroRedundancyOptimizer", 0.95),
    ("shardlib stage 2", "fully_shard without resharding", 0.85),
    ("shardlib stage 3", "fully_shard", 0.75),
    ("shardlib stage 3", "DeepSpeed stage 3", 0.75),
    ("shardlib stage 2", "DeepSpeed stage 2", None),
    ("shardlib stage 1", "DeepSpeed stage 1", None),
]
_WARM = 4  # steps before the clock runs, in which all must train alike
_AGREE = 1e-4


def measure(rounds: int) -> Section:
    """Two ranks, one thread each."""
    config = Config()
    os.environ["OMP_NUM_THREADS"] = "1"
    results = sl.launch(_rank, config, rounds, mesh={"data": 2}, timeout=1800)
    times = results[0][0]
    _check_losses([losses for _, losses in results])
    rows = []
    for name, reference, target in TARGETS:
        known = name in times and reference in times
        seconds = (statistics.median(times[name]), statistics.median(times[reference])) if known else None
        found = ratio(times[name], times[reference]) if known else None
        rows.append(Row(name, reference, target, found, seconds, lowest=0.98 if name == CONTROL else None))
    settings = {provider.name: provider.setting for provider in all_providers()}
    text = (
        f"One training step of a GPT ({config.layers} layers, width {config.width}, vocabulary {config.vocab}, sequence "
        f"{config.sequence}, batch {config.batch} per rank), fp32, AdamW without clipping, two gloo ranks of one thread. "
        f"{rounds} rounds; within a round every provider takes one step, in an order that rotates. In the first {_WARM} "
        f"steps, not timed, all losses agreed within {_AGREE:g}."
    )
    return Section("Step time against peers", text, rows, settings, times)


def _rank(mesh: sl.Mesh, config: Config, rounds: int) -> tuple[Times, dict[str, list[float]]]:
    torch.set_num_threads(1)
    steps = {provider.name: provider.make(config) for provider in all_providers()}
    assert torch.nn.functional.linear is torch._C._nn.linear, "a provider has replaced torch's functions for all"
    losses = {name: [step(_batch(config, mesh, n)) for n in range(_WARM)] for name, step in steps.items()}

    def call(step: Step) -> object:
        return lambda number: step(_batch(config, mesh, _WARM + number))

    return interleave({name: call(step) for name, step in steps.items()}, rounds, dist.barrier), losses


def _batch(config: Config, mesh: sl.Mesh, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    return random_batch(config, number * mesh.size + mesh.rank)


def _check_losses(ranks: list[dict[str, list[float]]]) -> None:
    """Means over ranks (peers report their own rank's loss) must be the same for everyone."""
    means = {name: [statistics.fmean(step) for step in zip(*(losses[name] for losses in ranks))] for name in ranks[0]}
    expected = means["DDP"]
    for name, found in means.items():
        worst = max(abs(a - b) for a, b in zip(found, expected))
        if worst > _AGREE:
            raise AssertionError(f"{name} trains differently from DDP: losses differ by {worst:g}")
