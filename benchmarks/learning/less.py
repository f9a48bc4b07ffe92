"""Learning with less: a GPT and a BERT that leave out layers or tokens as they train, against all of both, on real text.

Every run is a file of the work folder, written as it goes, so that a measurement that was stopped goes on with the runs that
are not finished. Seconds are those of the processor, as runs go side by side; `drops` has the wall clock's.
"""

from __future__ import annotations

import csv
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

import shardlib as sl
from benchmarks.harness import tables
from benchmarks.harness.case import CPU, Case, Result, Setting
from benchmarks.harness.results import read_rows
from benchmarks.learning import byte_gpt
from shardlib.data.bytes import batch_at, windows
from shardlib.models import bert, gpt

SEEDS = range(3)
TUNED_ON = 3  # the seed of the grids, which is not compared
ALL, LAYERS, TOKENS, BOTH = "all", "fewer layers", "fewer tokens", "fewer of both"
METHODS = (ALL, LAYERS, TOKENS, BOTH)
_EQUAL, _TIME, _SAVED = 1.01, 0.8, 0.75  # the largest ratios aimed for: of losses, of times, of layer-tokens
_WINDOWS = 16  # batches of 64 rows of held-out text
_MASK = 255  # a byte that the text, which is UTF-8, does not have


class Task(NamedTuple):
    """Sizes of the models, rows of a batch, steps, steps between evaluations, the grid of peak rates, and how often a
    little text is seen."""

    layers: int
    width: int
    sequence: int
    batch: int
    steps: int
    every: int
    rates: tuple[float, ...]
    epochs: int

    @property
    def little(self) -> int:
        """The bytes of a text that is seen that often."""
        return self.steps * self.batch * self.sequence // self.epochs


TASK = Task(12, 64, 64, 16, 2000, 200, (1e-3, 2e-3, 4e-3), epochs=16)
SMALL = Task(3, 8, 8, 2, 4, 2, (1e-3,), epochs=2)


class Job(NamedTuple):
    """One run; ``rate`` is the peak learning rate."""

    model: str
    method: str
    rate: float
    seed: int


class Point(NamedTuple):
    """``loss`` on held-out text, in nats per byte (of a BERT: per masked byte); the processor's ``seconds`` of the steps
    so far, and the tokens that layers saw in them."""

    step: int
    loss: float
    seconds: float
    layer_tokens: int


class Trial(NamedTuple):
    """A run that is finished."""

    job: Job
    curve: tuple[Point, ...]

    @property
    def final(self) -> Point:
        return self.curve[-1]


class Model(NamedTuple):
    """``batch(rows, step)`` makes a batch from rows of text, masked by the step's number; of the text are taken as many
    ``bytes`` as are given, or all."""

    params: Any
    loss_fn: Callable[..., Any]
    batch: Callable[[dict[str, torch.Tensor], int], dict[str, torch.Tensor]]
    bytes: int | None = None


def _gpt(task: Task, seed: int) -> Model:
    config = gpt.GPTConfig(vocab=256, layers=task.layers, width=task.width, heads=4, sequence=task.sequence)
    return Model(gpt.init(config, seed=seed), gpt.make_loss(config), lambda rows, step: rows)


def _gpt_on_little(task: Task, seed: int) -> Model:
    return _gpt(task, seed)._replace(bytes=task.little)


def _bert(task: Task, seed: int) -> Model:
    sizes = {"layers": task.layers, "width": task.width, "sequence": task.sequence}
    config = bert.BERTConfig(vocab=256, heads=4, pre_norm=True, **sizes)

    def masked(rows: dict[str, torch.Tensor], step: int) -> dict[str, torch.Tensor]:
        return bert.mask_tokens(config, rows["tokens"], _MASK, sl.Key(seed).fold_in("masks").fold_in(step))

    return Model(bert.init(config, seed=seed), bert.make_loss(config), masked)


MODELS = {"GPT": _gpt, "BERT": _bert, "GPT on little text": _gpt_on_little}
# Little text is for layer drop, whose paper trains for many epochs.
COMPARED = {name: (ALL, LAYERS) if name == "GPT on little text" else METHODS for name in MODELS}


def transform(task: Task, method: str) -> Any:
    """What a method leaves out. Layers by the paper's γ, 100 over the steps; of the tokens three quarters at first, and none
    after three quarters of the steps: 27 % of what twelve layers see, a quarter being aimed for."""
    layers = sl.progressive_layer_drop(0.5, 100 / task.steps)
    quarter, multiple = max(1, task.sequence // 4), max(1, task.sequence // 8)
    tokens = sl.random_ltd(sl.data.linear_pace(quarter, task.sequence, max(1, 3 * task.steps // 4), multiple=multiple))
    found = {ALL: [sl.random_ltd(task.sequence)], LAYERS: [layers], TOKENS: [tokens]}
    return sl.chain(sl.zero(0), *found.get(method, [layers, tokens]))


def train(task: Task, folder: Path, job: Job) -> Trial:
    """A run, whose curve is written to the work folder as it goes.

    The seed determines the initial model, the order of the text, and what is left out.
    """
    model = MODELS[job.model](task, job.seed)
    schedule = sl.optim.warmup_cosine_decay_schedule(0.0, job.rate, task.steps // 20, task.steps)
    optimizer = sl.optim.chain(sl.optim.clip_by_global_norm(1.0), sl.optim.adamw(schedule, 0.9, 0.98))
    sharded = sl.shard(model.params, sl.make_mesh(), transform(task, job.method))
    state, train_step = sl.make_train_step(model.loss_fn, sharded, optimizer, rng=job.seed)
    evaluate = sl.make_eval_step(_scores(model.loss_fn), state.params)
    text, held_out = byte_gpt.texts()
    text = text[: model.bytes]
    curve, seconds, seen = [], 0.0, 0
    with _file(folder, job).open("w", newline="") as opened:
        rows = csv.writer(opened, lineterminator="\n")
        rows.writerow(Point._fields)
        while state.step < task.steps:
            batch = model.batch(batch_at(text, task.batch, task.sequence, seed=job.seed, step=state.step), state.step)
            begun = time.process_time()
            state, metrics = train_step(state, batch)
            seconds, seen = seconds + time.process_time() - begun, seen + metrics["layer_tokens"]
            if state.step % task.every == 0 or state.step == task.steps:
                whole = windows(held_out, 64, task.sequence, limit=_WINDOWS)
                loss = float(evaluate.over(state, (model.batch(each, -n) for n, each in enumerate(whole, 1))))
                curve.append(Point(state.step, loss, seconds, seen))
                rows.writerow(_cells(curve[-1]))
                opened.flush()
    print(f"{_file(folder, job).stem}: {curve[-1].loss:.4f}", flush=True)
    return Trial(job, tuple(curve))


def _scores(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    def scores(params: Any, batch: dict[str, torch.Tensor]) -> sl.Mean:
        loss, size = loss_fn(params, batch), batch["targets"].numel()
        return loss if isinstance(loss, sl.Mean) else sl.Mean(loss * size, size)

    return scores


def _file(folder: Path, job: Job) -> Path:
    return folder / f"{job.model}, {job.method}, rate {job.rate:g}, seed {job.seed}.csv"


def _cells(point: Point) -> tuple[int, str, str, int]:
    return point.step, f"{point.loss:.6f}", f"{point.seconds:.3f}", point.layer_tokens


def finished(task: Task, folder: Path, jobs: Iterable[Job]) -> list[Trial]:
    """Those of the runs that a work folder has to their end."""
    trials = []
    for job in jobs:
        file = _file(folder, job)
        rows = read_rows(file) if file.exists() else []
        points = [Point(int(r["step"]), float(r["loss"]), float(r["seconds"]), int(r["layer_tokens"])) for r in rows]
        if points and points[-1].step == task.steps:
            trials.append(Trial(job, tuple(points)))
    return trials


def grids(task: Task) -> list[Job]:
    """The runs by which the rates of the models that leave out nothing are chosen; the others have the same."""
    return [Job(model, ALL, rate, TUNED_ON) for model in MODELS for rate in task.rates]


def compared(tuned: Sequence[Trial], seeds: Iterable[int]) -> list[Job]:
    """The runs that are compared, seed by seed."""
    rates = {name: min((t.final.loss, t.job.rate) for t in tuned if t.job.model == name)[1] for name in MODELS}
    return [Job(model, method, rates[model], seed) for seed in seeds for model in MODELS for method in COMPARED[model]]


def measure(setting: Setting) -> Result:
    """Trains what the work folder does not have to its end: the grids, then every method with as many seeds as rounds."""
    task = SMALL if setting.small else TASK
    with tempfile.TemporaryDirectory() as temporary:
        folder = setting.work or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)

        def run(jobs: list[Job]) -> list[Trial]:
            done = {trial.job for trial in finished(task, folder, jobs)}
            left = [(job,) for job in jobs if job not in done]
            if left:
                list(byte_gpt.side_by_side(partial(train, task, folder), left, setting.processes))
            return finished(task, folder, jobs)

        tuned = run(grids(task))
        trials = run(compared(tuned, SEEDS[: setting.rounds]))
    header = (*Job._fields, *Point._fields)
    samples = [(*trial.job, *_cells(point)) for trial in (*tuned, *trials) for point in trial.curve]
    return Result(text(task, tuned, trials), header, samples)


def text(task: Task, tuned: Sequence[Trial], trials: Sequence[Trial]) -> str:
    """The results as Markdown."""
    about = (
        "Loss on held-out text (nats per byte) of a GPT and a pre-norm BERT (per masked byte) on the bytes of Python's "
        f"standard library: {task.layers} layers, width {task.width}, {task.steps} steps of {task.batch} rows of "
        f"{task.sequence} bytes; “on little text”: on its first {task.little:,} bytes alone, which are seen {task.epochs} "
        "times; seeds of model, order of the text and what is left out. AdamW, a warm-up over a twentieth of the steps, "
        "then a cosine to 0, gradients clipped to 1, at the best rate of a grid for the model "
        "that leaves out nothing, on a seed of its own. Fewer layers: `progressive_layer_drop(0.5, 100 / steps)`; fewer "
        "tokens: `random_ltd`, a quarter of the tokens at first, all of them after three quarters of the steps. Ratios to "
        "the model that leaves out nothing, by seed. Time is the processor's, of the steps alone, on one thread."
    )
    found = {(t.job.model, t.job.method, t.job.seed): t.final for t in trials}
    columns = ["", "loss", "its ratio, ≤ 1.01", "time, ≤ 0.8", "layer-tokens, ≤ 0.75", ""]
    cells = []
    for model in MODELS:
        for method in COMPARED[model]:
            seeds = [s for m, how, s in found if (m, how) == (model, method) and (model, ALL, s) in found]
            pairs = [(found[model, method, seed], found[model, ALL, seed]) for seed in seeds]
            ratios = [[getattr(a, name) / getattr(b, name) for a, b in pairs] for name in Point._fields[1:]]
            loss = statistics.fmean(a.loss for a, _ in pairs)
            shown = [", ".join(f"{ratio:.3f}" for ratio in each) for each in ratios]
            cells.append(
                [f"{model}, {method}", f"{loss:.4f}", *shown, "" if method == ALL else _verdict(method, ratios)]
            )
    tried = [[f"{t.job.model}, rate {t.job.rate:g}", f"{t.final.loss:.4f}"] for t in tuned]
    lines = [*tables.grid(columns, cells), "", *tables.grid(["grid", "loss"], tried)]
    return tables.section("Final losses and times", about, lines)


def _verdict(method: str, ratios: Sequence[Sequence[float]]) -> str:
    """Whether the means over seeds are what is aimed for: of the loss, and of what the method is to save."""
    loss, seconds, seen = map(statistics.fmean, ratios)
    saves = seen <= _SAVED if method == TOKENS else seconds <= _TIME
    return "met" if loss <= _EQUAL and saves else "missed"


CASE = Case("learning_less", "training without some layers or tokens; a round is a seed", {CPU: len(SEEDS)}, measure)
