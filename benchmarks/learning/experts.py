"""Learning with experts: GPTs with experts against a dense one that does the same work per token, on real text.

Every run is a file of the work folder, written as it goes. So a measurement that was stopped goes on with the runs that are
not finished, and what is finished can be reported at any time (`python -m benchmarks collect FOLDER`).
"""

from __future__ import annotations

import csv
import dataclasses
import statistics
import tempfile
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

import shardlib as sl
from benchmarks.harness.case import CPU, Case, Result, Setting
from benchmarks.harness.results import read_rows
from benchmarks.learning import byte_gpt, expert_report
from benchmarks.learning.expert_models import SMALL, TASK, TUNED_ON, Model, Task, models
from benchmarks.learning.expert_report import Point, Trial
from shardlib.data.bytes import batch_at, windows
from shardlib.models import gpt, students

SEEDS = range(3)
_WINDOWS = 16  # batches of 64 rows of held-out text

Job = tuple[str, float, int]  # model, peak rate, seed


class Taught(NamedTuple):
    """What is trained: initial parameters, their loss, the model itself among them, and the plan."""

    params: Any
    loss_fn: Callable[..., Any]
    own: Callable[[Any], Any]
    transform: Any


def train(task: Task, folder: Path, name: str, rate: float, seed: int) -> Trial:
    """A run, whose curve is written to the work folder as it goes, and its parameters at the end.

    The seed determines the initial model and the order of the text.
    """
    model = _named(task, name)
    steps, file = round(model.steps * task.steps), _file(folder, name, rate, seed)
    taught = _taught(task, model, folder, rate, seed)
    schedule = sl.optim.warmup_cosine_decay_schedule(0.0, rate, steps // 20, steps)
    optimizer = sl.optim.chain(sl.optim.clip_by_global_norm(1.0), sl.optim.adamw(schedule, 0.9, 0.98))
    sharded = sl.shard(taught.params, sl.make_mesh(), taught.transform)
    state, train_step = sl.make_train_step(taught.loss_fn, sharded, optimizer)
    scores = _scores(model)
    evaluate = sl.make_eval_step(lambda params, batch: scores(taught.own(params), batch), state.params)
    text, held_out = byte_gpt.texts()
    curve = []
    with file.open("w", newline="") as opened:
        rows = csv.writer(opened, lineterminator="\n")
        rows.writerow(Point._fields)
        while state.step < steps:
            batch: dict[str, Any] = batch_at(text, task.batch, task.base.sequence, seed=seed, step=state.step)
            follows = float(state.step < model.follows * steps)
            state, metrics = train_step(state, batch | ({} if model.teacher is None else {"distill": follows}))
            if model.config.moe is not None and model.config.moe.balance:
                state = sl.replace_params(state, gpt.balanced(state.params, metrics["aux"]["experts"]))
            if state.step % task.every == 0 or state.step == steps:
                found = evaluate.over(state, windows(held_out, 64, task.base.sequence, limit=_WINDOWS))
                curve.append(Point(state.step, float(found["loss"]), _fullest(found.get("experts", {}))))
                if state.step == steps:  # before the row that says that the run is finished
                    torch.save(taught.own(sl.unshard(state.params)), file.with_suffix(".pt"))
                rows.writerow(_cells(curve[-1]))
                opened.flush()
    print(f"{file.stem}: {curve[-1].loss:.4f}", flush=True)
    return Trial(name, rate, seed, tuple(curve))


def _taught(task: Task, model: Model, folder: Path, rate: float, seed: int) -> Taught:
    params, frozen = gpt.init(model.config, seed=seed), sl.freeze("*router/balance")
    if model.teacher is None:
        biased = model.config.moe is not None and model.config.moe.balance
        transform = sl.chain(sl.zero(0), frozen) if biased else sl.zero(0)
        return Taught(params, gpt.make_loss(model.config), lambda params: params, transform)
    teacher = _named(task, model.teacher)
    theirs = torch.load(_file(folder, model.teacher, rate, seed).with_suffix(".pt"))
    both = {"student": params, "teacher": theirs}
    loss_fn = students.make_loss(model.config, teacher.config)
    return Taught(both, loss_fn, lambda params: params["student"], sl.chain(sl.zero(0), sl.freeze("teacher/*")))


def _scores(model: Model) -> Callable[..., Any]:
    """The loss without auxiliary losses, in nats per byte, and what the layers with experts say."""
    moe = model.config.moe
    loss_fn = gpt.make_loss(dataclasses.replace(model.config, moe=moe and dataclasses.replace(moe, load=0.0)))

    def scores(params: Any, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
        found, size = loss_fn(params, batch), batch["targets"].numel()
        loss, aux = (found, {}) if moe is None else found
        return aux | {"loss": sl.Mean(loss * size, size)}

    return scores


def _fullest(layers: dict[str, Any]) -> float:
    """The largest share of an expert over the mean, averaged over the layers that have experts; 1 without any."""
    shares = [[float(share) for share in layer["shares"]] for layer in layers.values()]
    return statistics.fmean(len(layer) * max(layer) for layer in shares) if shares else 1.0


def _named(task: Task, name: str) -> Model:
    return next(model for model in models(task) if model.name == name)


def _file(folder: Path, name: str, rate: float, seed: int) -> Path:
    return folder / f"{name}, rate {rate:g}, seed {seed}.csv"


def _cells(point: Point) -> tuple[int, str, str]:
    return (point.step, f"{point.loss:.6f}", f"{point.fullest:.4f}")


def finished(task: Task, folder: Path, jobs: Iterable[Job]) -> list[Trial]:
    """Those of the runs that a work folder has to their end."""
    trials = []
    for name, rate, seed in jobs:
        file = _file(folder, name, rate, seed)
        rows = read_rows(file) if file.exists() else []
        points = [Point(int(row["step"]), float(row["loss"]), float(row["fullest"])) for row in rows]
        if points and points[-1].step == round(_named(task, name).steps * task.steps):
            trials.append(Trial(name, rate, seed, tuple(points)))
    return trials


def grids(task: Task) -> list[Job]:
    """The runs that rates are chosen by."""
    return [(name, rate, TUNED_ON) for name, rates in task.rates.items() for rate in rates]


def compared(task: Task, tuned: Sequence[Trial], seeds: Iterable[int]) -> list[list[Job]]:
    """The runs that are compared: seed by seed the models, and then the ablations. Students come after their teachers."""
    rates = {name: expert_report.best_rate(name, tuned) for name in task.rates}

    def of(seed: int, ablation: bool, student: bool) -> list[Job]:
        kind = (ablation, student)
        found = [model for model in models(task) if (model.ablation, model.teacher is not None) == kind]
        return [(model.name, rates[model.tuned_as], seed) for model in found]

    return [of(seed, ablation, student) for ablation in (False, True) for seed in seeds for student in (False, True)]


def measure(setting: Setting) -> Result:
    """Trains what the work folder does not have to its end: the grids, then every model with as many seeds as rounds."""
    task = SMALL if setting.small else TASK
    with tempfile.TemporaryDirectory() as temporary:
        folder = setting.work or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)

        def run(jobs: list[Job]) -> list[Trial]:
            done = {trial.job for trial in finished(task, folder, jobs)}
            left = [job for job in jobs if job not in done]
            list(byte_gpt.side_by_side(partial(train, task, folder), left, setting.processes))
            return finished(task, folder, jobs)

        tuned, seeds = run(grids(task)), SEEDS[: setting.rounds]
        for jobs in compared(task, tuned, seeds):
            run(jobs)
        return result(task, folder, seeds)


def result(task: Task, folder: Path, seeds: Iterable[int] = SEEDS) -> Result:
    """The result of the runs that a work folder has to their end.

    Raises:
        ValueError: it does not have the grids.
    """
    tuned, wanted = finished(task, folder, grids(task)), grids(task)
    if len(tuned) < len(wanted):
        raise ValueError(
            f"{folder} has {len(tuned)} of the {len(wanted)} runs that rates are chosen by; finish them first: python -m "
            f"benchmarks run learning_experts --work {folder}"
        )
    jobs = [job for group in compared(task, tuned, seeds) for job in group]
    trials = finished(task, folder, jobs)
    done = {trial.job for trial in trials}
    missing = [f"{name}, seed {seed}" for name, rate, seed in jobs if (name, rate, seed) not in done]
    samples = [(*trial.job, *_cells(point)) for trial in (*tuned, *trials) for point in trial.curve]
    header = ("model", "rate", "seed", *Point._fields)
    return Result(expert_report.text(task, tuned, trials), header, samples, missing=missing)


CASE = Case("learning_experts", "GPTs with experts against a dense one; a round is a seed", {CPU: len(SEEDS)}, measure)
