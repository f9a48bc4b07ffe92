"""The effect of a larger batch on the final loss.

The byte-level GPT on a fixed number of samples: AdamW at a small batch, and at eight times that batch LAMB, and AdamW at its
rate times √8. AdamW and LAMB are tuned in the same way: the same number of rates, on a seed that is not compared.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import shardlib as sl
from benchmarks.harness import tables
from benchmarks.harness.case import CPU, Case, Result, Setting
from benchmarks.harness.results import FOLDER, read_rows
from benchmarks.learning import byte_gpt
from shardlib.models.gpt import GPTConfig
from shardlib.optim import GradientTransformation

CONFIG = GPTConfig(vocab=256, layers=2, width=64, heads=4, sequence=32)
ROWS = 8192  # of a run, for every batch size
SEEDS = range(3)
_TUNED_ON = 3  # the seed of the grid
_TIMES = 8
_DECAY = 0.01
_LABELS = {"*bias": "free", "*/ln?/*": "free", "*/norm/*": "free", "*": "decayed"}


class Method(NamedTuple):
    """``rates`` is the grid of peak learning rates; it is empty if the rate is that of another method, scaled."""

    optimizer: Callable[..., GradientTransformation]
    batch: int
    rates: tuple[float, ...] = ()


ADAMW, SCALED, LAMB = "AdamW", "AdamW, 8 times the batch", "LAMB, 8 times the batch"
# AdamW has one row per step, as LAMB does not reach AdamW at larger batches in so few steps: with 16 and 32 rows LAMB ended 2
# and 4 % above AdamW with 2 and 4 (one seed, a few rates).
METHODS = {
    ADAMW: Method(sl.optim.adamw, 1, (1e-3, 1.4e-3, 2e-3, 2.8e-3)),
    SCALED: Method(sl.optim.adamw, _TIMES),
    LAMB: Method(sl.optim.lamb, _TIMES, (0.0085, 0.012, 0.017, 0.024)),
}


class Trial(NamedTuple):
    """One run; ``loss`` is on validation text, in nats per byte."""

    method: str
    rate: float
    seed: int
    loss: float


class Gap(NamedTuple):
    """``difference`` of two means over seeds, and its standard error from the spreads of both."""

    difference: float
    error: float


def train(name: str, rate: float, seed: int, rows: int = ROWS) -> float:
    """The final validation loss of a method at a peak rate, in nats per byte."""
    method = METHODS[name]
    steps = rows // method.batch
    schedule = sl.optim.warmup_cosine_decay_schedule(0.0, rate, steps // 10, steps)
    decays = {"decayed": _DECAY, "free": 0.0}
    tx = sl.optim.partition(
        {label: method.optimizer(schedule, weight_decay=decay) for label, decay in decays.items()}, _LABELS
    )
    loss = byte_gpt.Run(CONFIG, method.batch, steps, tx).train(seed)
    print(f"{name}, rate {rate:.3g}, seed {seed}: {loss:.4f}", flush=True)
    return loss


def rate_of(name: str, trials: list[Trial]) -> float:
    """The best rate of a method's grid, or AdamW's best rate scaled by the square-root rule."""
    if not METHODS[name].rates:
        return sl.optim.sqrt_scaling(rate_of(ADAMW, trials), METHODS[name].batch, METHODS[ADAMW].batch)
    return min((trial.loss, trial.rate) for trial in trials if trial.method == name and trial.seed == _TUNED_ON)[1]


def losses_of(name: str, trials: list[Trial]) -> list[float]:
    """Losses by seed, of the seeds that are compared."""
    return [trial.loss for seed in SEEDS for trial in trials if (trial.method, trial.seed) == (name, seed)]


def gap(mine: list[float], theirs: list[float]) -> Gap:
    """The mean of ``mine`` minus the other mean, with its error."""
    error = math.sqrt(statistics.variance(mine) / len(mine) + statistics.variance(theirs) / len(theirs))
    return Gap(statistics.fmean(mine) - statistics.fmean(theirs), error)


def measure(setting: Setting) -> Result:
    """Runs the grids, then every method at its rate with as many seeds as rounds, at least two, as a spread needs two."""

    def trained(jobs: list[tuple[str, float, int]]) -> list[Trial]:
        job = partial(train, rows=16 * _TIMES if setting.small else ROWS)
        return [Trial(*each, loss) for each, loss in zip(jobs, byte_gpt.side_by_side(job, jobs, setting.processes))]

    seeds = range(min(len(SEEDS), max(2, setting.rounds)))
    trials = trained([(name, rate, _TUNED_ON) for name, method in METHODS.items() for rate in method.rates])
    trials += trained([(name, rate_of(name, trials), seed) for name in METHODS for seed in seeds])
    return Result(table(trials), Trial._fields, [(*trial[:-1], f"{trial.loss:.6f}") for trial in trials])


def table(trials: list[Trial]) -> str:
    """The comparison and the grids as Markdown."""
    about = (
        f"Final validation loss (nats per byte) of a GPT ({CONFIG.layers} layers, width {CONFIG.width}, sequence "
        f"{CONFIG.sequence}) on the bytes of Python's standard library, after {ROWS:,} rows in every run: "
        f"{len(SEEDS)} seeds of model and order of the text. Warm-up over a tenth of the steps, then a cosine to 0; weight "
        f"decay {_DECAY:g}, none for biases and norms; all else as by default. AdamW and LAMB have the best rate of their "
        "grid, on a seed of its own; AdamW at the larger batch has its rate times √8. “Above AdamW” is the difference of "
        "means and its standard error."
    )
    rows = []
    for name, method in METHODS.items():
        losses = losses_of(name, trials)
        found = gap(losses, losses_of(ADAMW, trials))
        cells = [name, method.batch, ROWS // method.batch, f"{rate_of(name, trials):.3g}"]
        cells += [f"{statistics.fmean(losses):.4f}", f"{statistics.stdev(losses):.4f}"]
        rows.append([*cells, "" if name == ADAMW else f"{found.difference:+.4f} ± {found.error:.4f}"])
    grids = []
    for name, method in METHODS.items():
        tried = [f"{t.rate:g}: {t.loss:.4f}" for t in trials if t.method == name and t.seed == _TUNED_ON]
        grids += [[name, ", ".join(tried)]] * bool(method.rates)
    columns = ["", "rows a step", "steps", "rate", "loss", "seed spread", "above AdamW"]
    lines = [*tables.grid(columns, rows), "", *tables.grid(["grid", "rate: loss"], grids)]
    return tables.section("Final losses", about, lines)


def read() -> list[Trial]:
    """The trials in ``results/large_batch.csv``."""
    rows = read_rows(FOLDER / "large_batch.csv")
    return [Trial(t["method"], float(t["rate"]), int(t["seed"]), float(t["loss"])) for t in rows]


CASE = Case("large_batch", "LAMB at eight times the batch against AdamW; a round is a seed", {CPU: len(SEEDS)}, measure)
