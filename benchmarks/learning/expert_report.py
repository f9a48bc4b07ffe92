"""Curves of models with experts as a table, what they show of what is claimed, and a plot."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness import tables
from benchmarks.harness.case import Result
from benchmarks.harness.plots import figure
from benchmarks.learning import expert_models as names
from benchmarks.learning.expert_models import DENSE, EARLY, EXPERTS, Task, models

_EQUAL = 1.01  # the ratio of losses up to which a model is as good as another


class Point(NamedTuple):
    """``loss`` on held-out text, in nats per byte; ``fullest``: the largest share of an expert over the mean, averaged over
    layers, of the same text."""

    step: int
    loss: float
    fullest: float


class Trial(NamedTuple):
    """One run."""

    model: str
    rate: float
    seed: int
    curve: tuple[Point, ...]

    @property
    def job(self) -> tuple[str, float, int]:
        return self[:3]

    @property
    def final(self) -> Point:
        return self.curve[-1]


class Claim(NamedTuple):
    """A claim that ``mine`` ends at most ``aim`` times as high as ``other``; ``paper`` where it is a paper's alone."""

    text: str
    mine: str
    other: str
    aim: float
    paper: str = ""


CLAIMS = (
    Claim(f"experts reach the dense model's loss in {EARLY:g} of its steps", names.SOONER, DENSE, 1.0),
    Claim("PR-MoE is as good as more experts", names.PR_MOE, EXPERTS, _EQUAL),
    Claim("a student of fewer layers is as good as its teacher", names.STUDENT, names.PR_MOE, _EQUAL),
    Claim("a bias does what the auxiliary loss does", names.BIAS, EXPERTS, _EQUAL),
    Claim(
        "a student that leaves its teacher ends lower than one that follows to the end",
        names.STUDENT,
        names.TO_THE_END,
        1.0,
        "2201.05596, 4.2",
    ),
    Claim("a student with a teacher ends lower than one without", names.STUDENT, names.ALONE, 1.0, "2201.05596, 4.2"),
    Claim("experts help more in later layers", names.SECOND, names.FIRST, 1.0, "2201.05596, 4.1.1"),
    Claim("without balance the loss is higher", EXPERTS, names.FREE, 1.0, "1701.06538, appendix A"),
    Claim("one expert per token is as good as two", names.SWITCH, EXPERTS, _EQUAL, "2101.03961, 2.1"),
)


def best_rate(name: str, tuned: Sequence[Trial]) -> float:
    """The rate of a model's grid with the lowest loss at the end."""
    return min((trial.final.loss, trial.rate) for trial in tuned if trial.model == name)[1]


def finals(name: str, trials: Sequence[Trial]) -> dict[int, Point]:
    """Seed -> the last point of a model's curve."""
    return {trial.seed: trial.final for trial in trials if trial.model == name}


def ratios(claim: Claim, trials: Sequence[Trial]) -> list[float]:
    """Losses over those of the other model, by seed, of the seeds that both have."""
    mine, other = finals(claim.mine, trials), finals(claim.other, trials)
    return [mine[seed].loss / other[seed].loss for seed in sorted(mine.keys() & other.keys())]


def verdict(claim: Claim, found: Sequence[float]) -> str:
    """Whether the claim held: of the aims on the mean, of a paper's alone in every seed."""
    if not found:
        return "not measured"
    if claim.paper:
        return "shown" if max(found) <= claim.aim else "not shown at this scale"
    return "met" if statistics.fmean(found) <= claim.aim else "missed"


def reached(trial: Trial, loss: float) -> float:
    """The first step at which a curve is at a loss, interpolated between evaluations; infinite if it never is."""
    before = None
    for point in trial.curve:
        if point.loss <= loss:
            if before is None:
                return point.step
            return before.step + (point.step - before.step) * (before.loss - loss) / (before.loss - point.loss)
        before = point
    return math.inf


def shares_of_steps(trials: Sequence[Trial]) -> list[float]:
    """By seed: the share of the dense model's steps after which `EXPERTS`' curve is at the loss that it ends at."""
    dense = {trial.seed: trial.final for trial in trials if trial.model == DENSE}
    curves = sorted((t.seed, t) for t in trials if t.model == EXPERTS and t.seed in dense)
    return [reached(trial, dense[seed].loss) / dense[seed].step for seed, trial in curves]


def text(task: Task, tuned: Sequence[Trial], trials: Sequence[Trial]) -> str:
    """The results as Markdown."""
    base, rows = task.base, task.batch * task.base.sequence
    about = (
        "Loss on held-out text (nats per byte) of GPTs on the bytes of Python's standard library: width "
        f"{base.width}, {base.layers} layers, and 3 of a student; {task.steps} steps of {rows:,} bytes, "
        f"{task.steps * rows / 1e6:.1f} million in all, fewer than the text has; seeds of model and order of the "
        "text. A byte does the same work in every layer, but for routers: it has the MLP, two experts of half "
        "its width, one of the whole width, or in PR-MoE one and the residual expert of half the width. Layers "
        "have eight experts unless something else is said; PR-MoE's have 4, 4, 8 and 8, its student's 4, 8 and "
        "8. AdamW, a warm-up over a twentieth of the steps, then a cosine to 0, gradients clipped to 1; the "
        f"auxiliary loss is multiplied by 0.01, the bias moves by 0.001. The dense model and “{EXPERTS}” each have the "
        "best rate of a grid by factors of 2, on a seed of its own, between rates that are worse, and all others with "
        f"experts have the latter's. A student follows for {names.FOLLOWS:g} of its steps. “Fullest” is the largest "
        "share of an expert over the mean, averaged over layers. “Over dense” is of the seeds that both have."
    )
    columns = ["", "parameters", "a byte meets", "steps", "loss", "seed spread", "over dense", "fullest", "seeds"]
    cells = []
    for model in models(task):
        points = finals(model.name, trials).values()
        if not points:
            continue
        losses = [point.loss for point in points]
        spread = f"{statistics.stdev(losses):.4f}" if len(losses) > 1 else ""
        over = statistics.fmean(ratios(Claim("", model.name, DENSE, 1.0), trials))
        fullest = "" if model.config.moe is None else f"{statistics.fmean(point.fullest for point in points):.2f}"
        sizes = [f"{model.parameters:,}", f"{model.met:,}", round(model.steps * task.steps)]
        cells.append(
            [model.name, *sizes, f"{statistics.fmean(losses):.4f}", spread, f"{over:.4f}", fullest, len(losses)]
        )
    tried = []
    for name in task.rates:
        found = sorted((t.rate, t.final.loss) for t in tuned if t.model == name)
        tried.append([name, ", ".join(f"{rate:g}: {loss:.4f}" for rate, loss in found)])
    lines = [
        *tables.grid(columns, cells),
        "",
        *_claimed(trials),
        "",
        *tables.grid(["grid", "rate: loss"], tried),
    ]
    return tables.section("Final losses", about, lines)


def _claimed(trials: Sequence[Trial]) -> list[str]:
    rows = []
    for claim in CLAIMS:
        found = ratios(claim, trials)
        by_seed = ", ".join(f"{ratio:.4f}" for ratio in found)
        where = f" (arXiv {claim.paper})" if claim.paper else ""
        rows.append(
            [f"{claim.text}{where}", claim.mine, claim.other, f"≤ {claim.aim:g}", by_seed, verdict(claim, found)]
        )
    lines = tables.grid(["claim", "loss of", "over that of", "aim", "by seed", ""], rows)
    if shares := shares_of_steps(trials):
        by_seed = ", ".join(f"{share:.2f}" for share in shares)
        lines += [
            "",
            f"On its way through all steps, with a rate that has not come down yet, “{EXPERTS}” is at the dense "
            f"model's final loss after these shares of the steps, by seed: {by_seed}. “{names.SOONER}” is a run "
            "of its own, whose rate comes down by then. A claim of a paper is shown where every seed has it.",
        ]
    return lines


def plot(path: Path, results: list[Result]) -> None:
    """Curves of the models, means over seeds, and the fullest experts."""
    (result,) = results
    made = figure(9, 4)
    left, right = made.subplots(1, 2)
    shown = (DENSE, EXPERTS, names.SOONER, names.PR_MOE, names.STUDENT, names.BIAS, names.FREE)
    for colour, name in enumerate(shown):
        by_step: dict[int, list[tuple[float, float]]] = {}
        for model, _, seed, step, loss, fullest in result.samples:
            if model == name and seed != names.TUNED_ON:
                by_step.setdefault(step, []).append((float(loss), float(fullest)))
        for axes, column in ((left, 0), (right, 1)):
            if by_step and not (axes is right and name == DENSE):
                means = [statistics.fmean(found[column] for found in values) for values in by_step.values()]
                axes.plot(list(by_step), means, color=f"C{colour}", label=name, linewidth=1.4)
    left.set(xlabel="step", ylabel="loss on held-out text, nats per byte")
    right.set(xlabel="step", ylabel="fullest expert / mean", ylim=(1, None))
    left.legend(frameon=False, fontsize=8)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    made.savefig(path)
