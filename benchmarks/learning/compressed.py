"""Losses of training with compressed communication.

The byte-level GPT on the source of Python's standard library, a fixed model and number of steps, every rank simulated; the
final validation loss of each method, and of ablations, over several seeds.
"""

from __future__ import annotations

import statistics
from functools import partial
from typing import NamedTuple

from benchmarks.harness import tables
from benchmarks.harness.case import CPU, Case, Result, Setting
from benchmarks.learning import byte_gpt
from benchmarks.learning.methods import RANKS, SMALL, TASK, Method, Task, methods

WITHIN = 1.01  # how much above its reference's loss a method may end
_SPREADS = 3  # an ablation is called worse where it is by this many seed spreads

Losses = dict[str, list[float]]  # method -> final validation loss by seed


class Verdict(NamedTuple):
    """``relative`` is the mean over the reference's mean, ``spreads`` the difference of means in seed spreads."""

    relative: float
    spreads: float

    def remark(self, ablation: bool) -> str:
        if not ablation:
            return "within 1 %" if self.relative <= WITHIN else "missed"
        return {True: "worse", False: ""}[self.spreads >= _SPREADS]


def train(task: Task, method: Method, seed: int) -> float:
    """The final validation loss in nats per byte; the seed determines the initial model and the order of the text."""
    how = (method.optimizer(task), method.transform, RANKS)
    return byte_gpt.Run(task.config, task.batch, task.steps, *how).train(seed)


def verdict(losses: Losses, method: Method) -> Verdict:
    """The comparison of a method with its reference. The seed spread is the larger of the two standard deviations."""
    assert method.against is not None
    mine, theirs = losses[method.name], losses[method.against]
    difference = statistics.fmean(mine) - statistics.fmean(theirs)
    spread = max(map(statistics.stdev, (mine, theirs)))
    return Verdict(statistics.fmean(mine) / statistics.fmean(theirs), difference / spread)


def measure(setting: Setting) -> Result:
    """Trains every method with as many seeds as rounds, at least two, as a spread needs two."""
    task = SMALL if setting.small else TASK
    jobs = [(method.name, seed) for method in methods() for seed in range(max(2, setting.rounds))]
    losses: Losses = {}
    for (name, _), loss in zip(jobs, byte_gpt.side_by_side(partial(_job, task), jobs, setting.processes)):
        losses.setdefault(name, []).append(loss)
    samples = [(name, seed, f"{loss:.6f}") for name, values in losses.items() for seed, loss in enumerate(values)]
    return Result(text(task, losses), ("method", "seed", "loss"), samples)


def _job(task: Task, name: str, seed: int) -> float:
    loss = train(task, next(method for method in methods() if method.name == name), seed)
    print(f"{name}, seed {seed}: {loss:.4f}", flush=True)
    return loss


def text(task: Task, losses: Losses) -> str:
    """The results as Markdown."""
    config, seeds = task.config, len(next(iter(losses.values())))
    about = (
        f"Final validation loss (nats per byte) of a GPT ({config.layers} layers, width {config.width}, sequence "
        f"{config.sequence}) on the bytes of Python's standard library: {task.steps} steps of {task.batch} rows on "
        f"{RANKS} simulated ranks, {seeds} seeds of model and order of the text. What stands against Adam has Adam's "
        f"learning rates (peak {task.adam:g}), against LAMB, LAMB's (peak {task.lamb:g}). Variances are frozen after "
        f"{task.freeze} steps. “Seed spread” is the standard deviation over the seeds, “spreads” the difference of means in "
        "the larger one of the two spreads. "
        f"A method is held to 1 % of its reference; an ablation is called worse where it is by {_SPREADS} spreads."
    )
    rows = []
    for method in methods():
        mine = losses[method.name]
        cells = [method.name, f"{statistics.fmean(mine):.4f}", f"{statistics.stdev(mine):.4f}"]
        if method.against is None:
            cells += [""] * 4
        else:
            found = verdict(losses, method)
            cells += [method.against, f"{found.relative:.4f}", f"{found.spreads:+.1f}", found.remark(method.ablation)]
        rows.append(cells)
    lines = tables.grid(["", "loss", "seed spread", "against", "ratio", "spreads", ""], rows)
    return tables.section("Final losses", about, lines)


CASE = Case("learning", "what compressed methods learn; a round is a seed", {CPU: 3}, measure)
