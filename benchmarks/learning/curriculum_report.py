"""Runs with curricula as a table: spikes, the tokens until the baseline's loss, and what they show of what is claimed."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

import shardlib as sl
from benchmarks.harness import tables
from benchmarks.learning.curriculum_arms import ARMS, BASE, FASTER, FEWER, LARGER, MORE, SHORT, WHOLE, Arm, Task

_SAVED = 0.8  # of the baseline's tokens: the share in which its loss is to be reached


class Point(NamedTuple):
    """A step: tokens consumed with it, its loss and the sizes of √v after it; ``held_out``: the loss on held-out text, in
    nats per byte, where it was evaluated."""

    step: int
    tokens: int
    loss: float
    norm: float
    largest: float
    held_out: float | None

    @classmethod
    def read(cls, row: Mapping[str, str]) -> Point:
        numbers = (float(row[name]) for name in ("loss", "norm", "largest"))
        return cls(int(row["step"]), int(row["tokens"]), *numbers, float(row["held_out"]) if row["held_out"] else None)

    @property
    def cells(self) -> tuple[Any, ...]:
        return tuple("" if value is None else f"{value:.6g}" if isinstance(value, float) else value for value in self)


class Trial(NamedTuple):
    """One run."""

    arm: str
    seed: int
    points: tuple[Point, ...]

    @property
    def final(self) -> float:
        """The last loss on held-out text."""
        return self.curve[-1][1]

    @property
    def curve(self) -> list[tuple[int, float]]:
        """Tokens and the loss on held-out text, where it was evaluated."""
        return [(point.tokens, point.held_out) for point in self.points if point.held_out is not None]

    def windows(self, tokens: int) -> list[Point]:
        """The run as if its steps had at least ``tokens`` tokens: for consecutive steps that together have as many the last
        one's point, with their mean loss per token and the last of their evaluations."""
        groups: list[list[Point]] = [[]]
        begun = 0
        for point in self.points:
            groups[-1].append(point)
            if point.tokens - begun >= tokens:
                groups.append([])
                begun = point.tokens
        rest = groups.pop()
        groups = [*groups[:-1], [*groups[-1], *rest]] if groups else [rest]
        ends = itertools.pairwise((0, *(group[-1].tokens for group in groups)))
        return [_joined(group, before, after) for group, (before, after) in zip(groups, ends, strict=True)]

    def stability(self, tokens: int) -> sl.report.Stability:
        """By windows of ``tokens`` tokens."""
        return sl.report.stability([point.loss for point in self.windows(tokens)])

    def correlation(self, tokens: int) -> float:
        """Pearson's, of the loss ratios of windows of ``tokens`` tokens with the largest √v."""
        ratios = [ratio if math.isfinite(ratio) else math.nan for ratio in self.stability(tokens).ratios]
        pairs = np.array([ratios, [point.largest for point in self.windows(tokens)]])
        pairs = pairs[:, np.isfinite(pairs).all(0)]
        return float(np.corrcoef(pairs)[0, 1]) if pairs.shape[1] > 1 and pairs.std(1).all() else math.nan

    def tokens_until(self, loss: float) -> float:
        """Consumed tokens after which the loss on held-out text is at ``loss``, interpolated; infinite if it never is."""
        before = None
        for tokens, found in self.curve:
            if found <= loss:
                if before is None:
                    return tokens
                return before[0] + (tokens - before[0]) * (before[1] - loss) / (before[1] - found)
            before = tokens, found
        return math.inf


def _joined(points: Sequence[Point], before: int, after: int) -> Point:
    starts = (before, *(point.tokens for point in points))
    loss = math.fsum(point.loss * (point.tokens - start) for point, start in zip(points, starts))
    held_out = [point.held_out for point in points if point.held_out is not None]
    return points[-1]._replace(loss=loss / (after - before), held_out=held_out[-1] if held_out else None)


def by_seed(trials: Sequence[Trial], arm: Arm) -> dict[int, Trial]:
    return {trial.seed: trial for trial in trials if trial.arm == arm.name}


def shares(trials: Sequence[Trial], arm: Arm) -> list[float]:
    """By seed: the tokens until the last loss of whole sequences at the same rate and batch, over the tokens of these."""
    base = by_seed(trials, Arm(WHOLE, arm.scale))
    pairs = [(trial, base[seed]) for seed, trial in sorted(by_seed(trials, arm).items()) if seed in base]
    return [mine.tokens_until(theirs.final) / theirs.points[-1].tokens for mine, theirs in pairs]


def text(task: Task, trials: Sequence[Trial]) -> str:
    """The results as Markdown."""
    config = task.config
    about = (
        "GPTs on the bytes of Python's standard library: "
        f"width {config.width}, {config.layers} layers, sequences of {config.sequence}; batches of {task.batch} rows and a "
        f"peak rate of {task.rate:g}, or multiples of them; {task.tokens / 1e6:.2g} million tokens. AdamW, gradients "
        f"clipped to 1; the rate rises over {task.warmup:g} of the tokens and falls as a cosine, both by consumed tokens. "
        f"Lengths (or rows) grow linearly, from an eighth, over {task.grows:g} of the steps that whole batches would take; "
        "“more of them”: as many more rows as they are shorter. Spikes are losses more than 1.2 or 1.5 times "
        f"the smallest before (arXiv 2108.06084), means over seeds. A loss is that of a step, or of so many that they have "
        f"{task.window:,} tokens: those of fewer are too noisy to count. “Spiked”: runs with a loss above 1.2. “With √v”: "
        "the correlation of the ratio with the largest √v of Adam. “Tokens” is the share of the tokens of whole sequences, "
        "at the same rate and batch, after which their last loss on held-out text (nats per byte) is reached."
    )
    columns = ["", "steps", "loss", "> 1.2", "> 1.5", "spiked", "largest ratio", "with √v", "tokens, by seed"]
    cells = []
    for arm in ARMS:
        found = by_seed(trials, arm)
        if not found:
            continue
        runs = list(found.values())
        stabilities = [run.stability(task.window) for run in runs]
        cells.append(
            [
                arm.name,
                len(runs[0].points),
                f"{statistics.fmean(run.final for run in runs):.4f}",
                *(f"{statistics.fmean(each.spikes(above) for each in stabilities):.1f}" for above in (1.2, 1.5)),
                f"{sum(each.spikes() > 0 for each in stabilities)} of {len(runs)}",
                f"{max(each.largest for each in stabilities):.2f}",
                f"{statistics.fmean(run.correlation(task.window) for run in runs):.2f}",
                ", ".join(f"{share:.2f}" for share in shares(trials, arm)),
            ]
        )
    return tables.section("Curricula", about, [*tables.grid(columns, cells), "", *_claimed(task, trials)])


def _claimed(task: Task, trials: Sequence[Trial]) -> list[str]:
    rows = []
    for scale, way, other in itertools.product((FASTER, LARGER), (SHORT, MORE), (WHOLE, FEWER)):
        mine, theirs = (by_seed(trials, Arm(each, scale)) for each in (way, other))
        pairs = [
            [run[s].stability(task.window).spikes() for run in (mine, theirs)] for s in sorted(mine.keys() & theirs)
        ]
        ours, others = map(sum, zip(*pairs, strict=True)) if pairs else (0, 0)
        found = ", ".join(f"{a} / {b}" for a, b in pairs)
        verdict = _verdict(pairs, ours < others) if others else "no spikes to avoid"
        rows.append([f"{scale.name}: {way.name} has fewer spikes than {other.name}", "fewer", found, verdict])
    for arm in (Arm(way, scale) for scale in (BASE, FASTER, LARGER) for way in (SHORT, MORE)):
        found_shares = shares(trials, arm)
        held = bool(found_shares) and statistics.fmean(found_shares) <= _SAVED
        claim = f"{arm.name}: tokens until the loss of whole sequences"
        rows.append([claim, f"≤ {_SAVED:g}", ", ".join(f"{s:.2f}" for s in found_shares), _verdict(found_shares, held)])
    return tables.grid(["claim", "aim", "by seed", ""], rows)


def _verdict(found: Sequence[Any], held: bool) -> str:
    return ("met" if held else "missed") if found else "not measured"
