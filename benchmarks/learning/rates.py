"""Compressed optimizers against their references, each at several learning rates.

The task of `benchmarks.learning`. A rate is chosen by the loss on one half of the validation text, averaged over the seeds;
losses are reported on the other. Rates differ by factors of two, and by √2 on both sides of the best one.
Finished runs are written down at once, so that an interrupted sweep resumes on the same commit.
"""

from __future__ import annotations

import csv
import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness import tables
from benchmarks.harness.case import CPU, Case, Result, Setting
from benchmarks.harness.provenance import commit
from benchmarks.harness.results import FOLDER, read_rows
from benchmarks.learning import byte_gpt
from benchmarks.learning.methods import RANKS, SMALL, TASK, Task, methods
from shardlib.errors import NonFiniteError

SEEDS = range(3)
AGAINST = {"Adam": ("1-bit Adam", "0/1 Adam"), "LAMB": ("1-bit LAMB",)}  # reference -> what is held against it
METHODS = {name: reference for reference, others in AGAINST.items() for name in (reference, *others)}
_MIDDLE = {"Adam": TASK.adam, "LAMB": TASK.lamb}
_FIRST = (-4, -2, 0, 2, 4)  # steps of √2 from the middle

Job = tuple[str, float, int]  # method, peak rate, seed


class Trial(NamedTuple):
    """``chosen_by`` and ``reported``: losses on two halves of the validation text, nats per byte; inf where it diverged."""

    method: str
    rate: float
    seed: int
    chosen_by: float
    reported: float


def train(task: Task, name: str, rate: float, seed: int) -> Trial:
    """The losses of one run."""
    task = dataclasses.replace(task, adam=rate, lamb=rate)
    method = next(method for method in methods() if method.name == name)
    run = byte_gpt.Run(task.config, task.batch, task.steps, method.optimizer(task), method.transform, RANKS)
    try:
        losses = run.train_on_halves(seed)
    except NonFiniteError:
        losses = (math.inf, math.inf)
    return Trial(name, rate, seed, *losses)


def missing(trials: Sequence[Trial]) -> list[Job]:
    """The next trials; none once every best rate has neighbours, and every method has its reference's best rate."""
    if first := _left(trials, [(name, step) for name in METHODS for step in _FIRST]):
        return first
    best = {name: _step(name, best_rate(name, trials)) for name in METHODS}
    around = [(name, best[name] + by) for name in METHODS for by in (-1, 1)]
    return _left(trials, around + [(name, best[reference]) for name, reference in METHODS.items()])


def rate_at(name: str, step: int) -> float:
    """The rate at a number of steps of √2 from the rate of `benchmarks.learning`, to three digits."""
    return float(f"{_MIDDLE[METHODS[name]] * 2 ** (step / 2):.3g}")


def _step(name: str, rate: float) -> int:
    return round(2 * math.log2(rate / _MIDDLE[METHODS[name]]))


def _left(trials: Sequence[Trial], wanted: Iterable[tuple[str, int]]) -> list[Job]:
    done = {trial[:3] for trial in trials}
    jobs = [(name, rate_at(name, step), seed) for name, step in dict.fromkeys(wanted) for seed in SEEDS]
    return [job for job in jobs if job not in done]


def rates_of(name: str, trials: Sequence[Trial]) -> list[float]:
    """The rates at which a method was tried with every seed."""
    found = sorted({trial.rate for trial in trials if trial.method == name})
    return [rate for rate in found if len(_at(name, rate, trials)) == len(SEEDS)]


def best_rate(name: str, trials: Sequence[Trial]) -> float:
    """The rate with the least mean over seeds of the loss that rates are chosen by."""
    return min(rates_of(name, trials), key=lambda rate: statistics.fmean(t.chosen_by for t in _at(name, rate, trials)))


def reported(name: str, rate: float, trials: Sequence[Trial]) -> list[float]:
    """Losses by seed."""
    return [trial.reported for trial in sorted(_at(name, rate, trials), key=lambda trial: trial.seed)]


def _at(name: str, rate: float, trials: Sequence[Trial]) -> list[Trial]:
    return [trial for trial in trials if (trial.method, trial.rate) == (name, rate)]


def read(path: Path = FOLDER / "learning_rates.csv") -> list[Trial]:
    """The trials in a file."""
    return [
        Trial(t["method"], float(t["rate"]), int(t["seed"]), float(t["chosen_by"]), float(t["reported"]))
        for t in read_rows(path)
    ]


def sweep(notes: Path, processes: int | None = None) -> list[Trial]:
    """Runs the trials that are missing in the file ``notes``, adds them to it, and returns all trials."""
    if not notes.exists():
        notes.write_text(",".join(Trial._fields) + "\n")
    trials = read(notes)
    while jobs := missing(trials):
        for trial in byte_gpt.side_by_side(partial(train, TASK), jobs, processes):
            trials.append(trial)
            with notes.open("a", newline="") as file:
                csv.writer(file, lineterminator="\n").writerow(_sample(trial))
            print(f"{trial.method}, rate {trial.rate:g}, seed {trial.seed}: {trial.reported:.4f}", flush=True)
    return trials


def measure(setting: Setting) -> Result:
    """Runs the whole sweep; a small one ends after the first grid."""
    if setting.small:
        trials = list(byte_gpt.side_by_side(partial(train, SMALL), missing([]), setting.processes))
    else:
        notes = FOLDER / f"learning_rates.unfinished.{commit().replace(' ', '-')}.csv"
        trials = sweep(notes, setting.processes)
        notes.unlink()
    return Result(table(trials), Trial._fields, [_sample(trial) for trial in trials])


def _sample(trial: Trial) -> tuple[str | float, ...]:
    return (*trial[:3], *(f"{loss:.6f}" for loss in trial[3:]))


def table(trials: Sequence[Trial]) -> str:
    """Both comparisons and the grids as Markdown."""
    config = TASK.config
    about = (
        f"Final loss (nats per byte) of a GPT ({config.layers} layers, width {config.width}, sequence {config.sequence}) on "
        f"the bytes of Python's standard library, as in `benchmarks.learning`: {TASK.steps} steps of {TASK.batch} rows on "
        f"{RANKS} simulated ranks, variances frozen after {TASK.freeze}, {len(SEEDS)} seeds. Every method is trained at peak "
        "rates that differ by factors of 2, and by √2 on both sides of its best one. A method's best rate is that of the "
        "lowest mean loss on one half of the validation text; all losses shown are of the other half. Ratios are of means "
        "over the seeds."
    )
    rows = []
    for name, reference in METHODS.items():
        theirs, own = best_rate(reference, trials), best_rate(name, trials)
        base = statistics.fmean(reported(reference, theirs, trials))
        there, losses = statistics.fmean(reported(name, theirs, trials)), reported(name, own, trials)
        mean, spread = statistics.fmean(losses), statistics.stdev(losses)
        compared = ["", "", "", ""]
        if name != reference:
            compared = [reference, f"{theirs:g}", f"{there:.4f}", f"{there / base:.3f}"]
        rows.append([name, *compared, f"{own:g}", f"{mean:.4f}", f"{spread:.4f}", f"{mean / base:.3f}"])
    columns = [
        "",
        "against",
        "its best rate",
        "loss there",
        "ratio",
        "own best rate",
        "loss there",
        "seed spread",
        "ratio",
    ]
    tried = [
        [name, ", ".join(f"{r:g}: {statistics.fmean(reported(name, r, trials)):.4f}" for r in rates_of(name, trials))]
        for name in METHODS
    ]
    lines = [*tables.grid(columns, rows), "", *tables.grid(["mean loss at every rate", ""], tried)]
    return tables.section("Losses at the best rates", about, lines)


CASE = Case("learning_rates", "the 1-bit family at several learning rates; a sweep", {CPU: 1}, measure)
