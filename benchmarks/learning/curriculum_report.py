"""Runs with curricula as a table: spikes, the tokens until the baseline's loss, and what they show of what is claimed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
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
        return tuple("" if value is None else value for value in self)


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

    @property
    def stability(self) -> sl.report.Stability:
        return sl.report.stability([point.loss for point in self.points])

    def correlation(self, size: Callable[[Point], float]) -> float:
        """Pearson's, of the loss ratios with a size of √v."""
        ratios = [ratio if math.isfinite(ratio) else math.nan for ratio in self.stability.ratios]
        pairs = np.array([ratios, [size(point) for point in self.points]])
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


def by_seed(trials: Sequence[Trial], arm: Arm) -> dict[int, Trial]:
    return {trial.seed: trial for trial in trials if trial.arm == arm.name}


def shares(trials: Sequence[Trial], arm: Arm) -> list[float]:
    """By seed: the tokens until the baseline's last loss, over the baseline's tokens."""
    base = by_seed(trials, Arm(WHOLE, BASE))
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
        "“more of them”: as many more rows as they are shorter. Spikes are steps whose loss is more than 1.2 or 1.5 times "
        "the smallest before (arXiv 2108.06084), means over seeds; steps of fewer tokens have noisier losses. “With √v”: the "
        "correlation of this ratio with the largest √v of Adam. “Tokens” is the share of the baseline's tokens after which "
        "its last loss on held-out text (nats per byte) is reached."
    )
    columns = ["", "steps", "loss", "> 1.2", "> 1.5", "largest ratio", "with √v", "tokens, by seed", "seeds"]
    cells = []
    for arm in ARMS:
        found = by_seed(trials, arm)
        if not found:
            continue
        runs = list(found.values())
        cells.append(
            [
                arm.name,
                len(runs[0].points),
                f"{statistics.fmean(run.final for run in runs):.4f}",
                *(f"{statistics.fmean(run.stability.spikes(above) for run in runs):.1f}" for above in (1.2, 1.5)),
                f"{max(run.stability.largest for run in runs):.2f}",
                f"{statistics.fmean(run.correlation(lambda point: point.largest) for run in runs):.2f}",
                ", ".join(f"{share:.2f}" for share in shares(trials, arm)),
                len(runs),
            ]
        )
    return tables.section("Curricula", about, [*tables.grid(columns, cells), "", *_claimed(trials)])


def _claimed(trials: Sequence[Trial]) -> list[str]:
    rows = []
    for scale in (FASTER, LARGER):
        for way, other in (
            (MORE, WHOLE),
            (SHORT, FEWER),
        ):  # whose steps have about as many tokens, and so as much noise
            mine, theirs = (by_seed(trials, Arm(each, scale)) for each in (way, other))
            pairs = [(mine[s].stability.spikes(), theirs[s].stability.spikes()) for s in sorted(mine.keys() & theirs)]
            held = bool(pairs) and all(a < b for a, b in pairs)
            found = ", ".join(f"{a} / {b}" for a, b in pairs)
            claim = f"{scale.name}: {way.name} has fewer spikes than {other.name}"
            rows.append([claim, "fewer", found, _verdict(pairs, held)])
    for arm in (Arm(way, scale) for scale in (BASE, FASTER, LARGER) for way in (SHORT, MORE)):
        found_shares = shares(trials, arm)
        held = bool(found_shares) and statistics.fmean(found_shares) <= _SAVED
        claim = f"{arm.name}: tokens until the baseline's loss"
        rows.append([claim, f"≤ {_SAVED:g}", ", ".join(f"{s:.2f}" for s in found_shares), _verdict(found_shares, held)])
    return tables.grid(["claim", "aim", "by seed", ""], rows)


def _verdict(found: Sequence[Any], held: bool) -> str:
    return ("met" if held else "missed") if found else "not measured"
