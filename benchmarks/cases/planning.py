"""Seconds of the processor that it takes to search for plans of large models, and to refuse those of deep ones."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import shardlib as sl
from benchmarks.harness.case import CPU, Case, Result, Setting
from benchmarks.harness.tables import grid, section
from benchmarks.harness.timing import processor
from shardlib.models import gpt
from shardlib.plan import Link, Machine
from shardlib.plan.tables import count, size
from shardlib.search.value import Search

_HEADER = ("section", "what", "round", "seconds")
_TARGET = 60.0  # seconds, of the search for the largest
_TX: sl.optim.GradientTransformation = sl.optim.adamw(1e-3)

MACHINE = Machine(
    "80GiB",
    {"bf16": 2e14, "fp32": 2e13},
    Link(3e11, 3e-6),
    Link(2e11, 1e-5),
    ranks_per_host=8,
    streaming=1.5e12,
    launches=2e5,
    host_memory="1TiB",
    ways={"down": 2e10, "up": 2e10, "update": 2e10},
)


class Job(NamedTuple):
    """A GPT to search a plan for, with sequences of 2,048.

    Attributes:
        rows: of all ranks together.
    """

    layers: int
    width: int
    heads: int
    ranks: int
    rows: int

    def search(self) -> Search:
        config = gpt.GPTConfig(vocab=51200, layers=self.layers, width=self.width, heads=self.heads, sequence=2048)
        return sl.search_plan(
            gpt.make_sequential(config),
            gpt.to_blocks(gpt.init(config, device="meta")),
            MACHINE,
            _batch(self.rows, config.sequence),
            optimizer=_TX,
            ranks=self.ranks,
            rules=gpt.slicing_rules(config, blocks=True),
        )


JOBS = (Job(24, 2048, 16, 16, 64), Job(40, 5120, 40, 128, 512), Job(96, 12288, 96, 1024, 1536))
SMALL = (Job(12, 64, 2, 2, 4),)


def _batch(rows: int, length: int) -> dict[str, torch.Tensor]:
    return {name: torch.empty(rows, length, dtype=torch.int64, device="meta") for name in ("tokens", "targets")}


def measure_searches(setting: Setting) -> Result:
    samples, rows = [], []
    for job in SMALL if setting.small else JOBS:
        found, seconds = _timed(job.search, setting.rounds)
        best = found.winner
        name = f"{count(best.plan.parameters)} on {job.ranks:,} ranks"
        samples += [("searches", name, number, f"{taken:.6f}") for number, taken in enumerate(seconds)]
        shown = f"{best.choice}: {best.seconds:.4g} s, {size(best.bytes)}"
        rows.append((name, f"{found.considered:,}", found.planned, f"{statistics.median(seconds):.1f}", shown))
    about = (
        "GPTs on ranks of 80 GiB, 8 on a host of 1 TiB, with the rates of data sheets. What is searched: meshes, stages, "
        "slices, pipelines, recompute, precisions, offload and sizes of micro-batches. Seconds of one processor, "
        f"{_rounds(setting)}; {_TARGET:.0f} are wanted for the largest."
    )
    columns = ("model", "choices", "planned", "seconds", "the winner, its step and a rank's peak")
    return Result(section("Searches", about, grid(columns, rows)), _HEADER, samples)


def measure_refusals(setting: Setting) -> Result:
    samples, rows = [], []
    for layers in (1,) if setting.small else (24, 48, 100):
        advice, seconds = _timed(lambda layers=layers: _refused(layers, 128 if setting.small else 1024), setting.rounds)
        name = f"{layers} layers"
        samples += [("refusals", name, number, f"{taken:.6f}") for number, taken in enumerate(seconds)]
        rows.append((name, f"{statistics.median(seconds):.1f}", advice))
    about = (
        "`make_plan` of a GPT of width 1,024 with 51,200 tokens, data=4 × model=2, `zero(1)`, slices and bf16, for 1 GiB, "
        "which it does not fit: changes of the plan are planned until some do. Seconds of one processor, "
        f"{_rounds(setting)}."
    )
    return Result(section("Refusals", about, grid(("", "seconds", "advice"), rows)), _HEADER, samples)


def _rounds(setting: Setting) -> str:
    return f"median of {setting.rounds}" if setting.rounds > 1 else "once"


def _refused(layers: int, width: int) -> str:
    """What a refusal advises."""
    config = gpt.GPTConfig(vocab=50 * width, layers=layers, width=width, heads=width // 64, sequence=512)
    try:
        sl.make_plan(
            gpt.init(config, device="meta"),
            sl.abstract_mesh(data=4, model=2),
            sl.chain(sl.zero(1), sl.tensor_slicing(gpt.slicing_rules(config)), sl.precision("bf16")),
            loss_fn=gpt.make_loss(config),
            batch=_batch(8, config.sequence),
            optimizer=_TX,
            device_memory=1024 * width**2,
        )
    except sl.errors.IllegalComposition as refusal:
        told = (line for line in str(refusal).splitlines() if "change that fits:" in line or "fits alone" in line)
        return next(told).split(". A step takes")[0]
    raise AssertionError("the plan fits")


def _timed(call: Callable[[], Any], rounds: int) -> tuple[Any, list[float]]:
    """What the last call returned, and the processor's seconds of each."""
    found: list[Any] = []
    seconds = [processor(lambda: found.append(call())) for _ in range(rounds)]
    return found[-1], seconds


CASES = (
    Case("searches", "the search for plans of large models", {CPU: 3}, measure_searches),
    Case("refusals", "plans of deep models that do not fit", {CPU: 1}, measure_refusals),
)
