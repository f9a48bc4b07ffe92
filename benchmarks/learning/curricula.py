"""Learning with curricula: stability at larger rates and batches, and the tokens until the baseline's loss, on real text.

Every run is a file of the work folder, written as it goes, so that a measurement that was stopped goes on with the runs that
are not finished.
"""

from __future__ import annotations

import csv
import itertools
import math
import tempfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import shardlib as sl
from benchmarks.harness.case import CPU, Case, Result, Setting
from benchmarks.harness.results import read_rows
from benchmarks.learning import byte_gpt, curriculum_report
from benchmarks.learning.curriculum_arms import ARMS, SMALL, TASK, Task
from benchmarks.learning.curriculum_report import Point, Trial
from shardlib.data.bytes import windows
from shardlib.models import gpt

SEEDS = range(3)
_WINDOWS = 8  # batches of 64 rows of held-out text

Job = tuple[str, int]  # arm, seed


def train(task: Task, folder: Path, name: str, seed: int) -> None:
    """A run, whose steps are written to the work folder as it goes. The seed determines model and order of the text."""
    arm, config = next(arm for arm in ARMS if arm.name == name), task.config
    plan, steps = arm.plan(task), arm.steps(task)
    optimizer = sl.optim.chain(sl.optim.clip_by_global_norm(1.0), sl.optim.adamw(arm.rate(task), 0.9, 0.98))
    loss_fn = gpt.make_loss(config)
    state, train_step = sl.make_train_step(loss_fn, gpt.init(config, seed=seed), optimizer, nonfinite="skip")
    evaluate = sl.make_eval_step(loss_fn, state.params)
    text, held_out = byte_gpt.texts()
    batches = sl.data.loader(_samples(text, config.sequence), state, plan, seed=seed, map=_as_tokens)
    with _file(folder, name, seed).open("w", newline="") as opened:
        rows = csv.writer(opened, lineterminator="\n")
        rows.writerow(Point._fields)
        due = 0.0
        for batch in itertools.islice(batches, steps):
            state, metrics = train_step(state, batch)
            tokens, loss = plan.tokens(state.step), ""
            if tokens >= due or state.step == steps:
                due += task.every * task.tokens
                scores = [
                    float(evaluate(state, each)) for each in windows(held_out, 64, config.sequence, limit=_WINDOWS)
                ]
                loss = f"{math.fsum(scores) / len(scores):.6f}"
            sizes = sl.report.second_moments(state)
            own = f"{float(metrics['loss']):.6f}"
            rows.writerow((state.step, tokens, own, f"{sizes.norm:.6g}", f"{sizes.largest:.6g}", loss))
            if loss:
                opened.flush()
    print(f"{_file(folder, name, seed).stem}: {loss}", flush=True)


def _samples(text: Any, sequence: int) -> dict[str, torch.Tensor]:
    """Windows of the text, one behind the other, and their targets, as bytes."""
    count = (len(text) - 1) // sequence
    whole = torch.from_numpy(text[: count * sequence + 1])
    return {"tokens": whole[:-1].view(count, sequence), "targets": whole[1:].view(count, sequence)}


def _as_tokens(batch: dict[str, torch.Tensor], step: int) -> dict[str, torch.Tensor]:
    return {name: leaf.long() for name, leaf in batch.items()}


def _file(folder: Path, name: str, seed: int) -> Path:
    return folder / f"{name}, seed {seed}.csv"


def finished(task: Task, folder: Path, jobs: Iterable[Job]) -> list[Trial]:
    """Those of the runs that a work folder has to their end."""
    trials, steps = [], {arm.name: arm.steps(task) for arm in ARMS}
    for name, seed in jobs:
        file = _file(folder, name, seed)
        points = [Point.read(row) for row in read_rows(file)] if file.exists() else []
        if points and points[-1].step == steps[name] and points[-1].held_out is not None:
            trials.append(Trial(name, seed, tuple(points)))
    return trials


def measure(setting: Setting) -> Result:
    """Trains what the work folder does not have to its end: every arm with as many seeds as rounds."""
    task, seeds = SMALL if setting.small else TASK, SEEDS[: setting.rounds]
    jobs = [(arm.name, seed) for seed in seeds for arm in ARMS]
    with tempfile.TemporaryDirectory() as temporary:
        folder = setting.work or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        done = {(trial.arm, trial.seed) for trial in finished(task, folder, jobs)}
        left = [job for job in jobs if job not in done]
        list(byte_gpt.side_by_side(partial(train, task, folder), left, setting.processes))
        trials = finished(task, folder, jobs)
    samples = [(trial.arm, trial.seed, *point.cells) for trial in trials for point in trial.windows(task.window)]
    return Result(curriculum_report.text(task, trials), ("arm", "seed", *Point._fields), samples)


CASE = Case(
    "learning_curricula",
    "short sequences first against whole ones and fewer rows, at larger rates; a round is a seed",
    {CPU: len(SEEDS)},
    measure,
)
