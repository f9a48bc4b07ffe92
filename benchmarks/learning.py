"""What compressed communication learns: ``python -m benchmarks.learning [--seeds 3]``.

The byte-level GPT on the source of Python's standard library, a fixed model and number of steps, every rank simulated; the
final validation loss of each method, and of ablations, over several seeds.
"""

from __future__ import annotations

import argparse
import statistics
from typing import NamedTuple

from benchmarks import byte_gpt
from benchmarks.learning_methods import Method, Task, methods
from benchmarks.report import machine, results, write_rows
from shardlib.models.gpt import GPTConfig

# At LAMB's rate it ends lowest itself, of 0.01, 0.015, 0.02 and 0.03; at 0.03 1-bit LAMB diverges with two of three seeds.
TASK = Task(GPTConfig(vocab=256, layers=2, width=64, heads=4, sequence=32), batch=16, steps=500, adam=1.5e-3, lamb=0.02)
WITHIN = 1.01  # how much above its reference's loss a method may end
RANKS = 2
_SPREADS = 3  # an ablation is called worse where it is by this many seed spreads

Losses = dict[str, list[float]]  # method -> final validation loss by seed


class Verdict(NamedTuple):
    """``relative`` is mean over the reference's mean, ``spreads`` the difference of means in seed spreads."""

    relative: float
    spreads: float

    def told(self, ablation: bool) -> str:
        if not ablation:
            return "within 1 %" if self.relative <= WITHIN else "missed"
        return {True: "worse", False: ""}[self.spreads >= _SPREADS]


def train(task: Task, method: Method, seed: int) -> float:
    """Final validation loss, in nats per byte; model and order of the text are the seed's."""
    how = (method.optimizer(task), method.transform, RANKS)
    return byte_gpt.Run(task.config, task.batch, task.steps, *how).train(seed)


def verdict(losses: Losses, method: Method) -> Verdict:
    """A method against what it is compared with. The seed spread is the larger one of the two standard deviations."""
    assert method.against is not None
    mine, theirs = losses[method.name], losses[method.against]
    difference = statistics.fmean(mine) - statistics.fmean(theirs)
    spread = max(map(statistics.stdev, (mine, theirs)))
    return Verdict(statistics.fmean(mine) / statistics.fmean(theirs), difference / spread)


def measure(seeds: int) -> Losses:
    """Every method with every seed, in one process a core."""
    jobs = [(method.name, seed) for method in methods() for seed in range(seeds)]
    found = byte_gpt.side_by_side(_job, jobs)
    losses: Losses = {}
    for (name, _), loss in zip(jobs, found):
        losses.setdefault(name, []).append(loss)
    return losses


def _job(name: str, seed: int) -> float:
    loss = train(TASK, next(method for method in methods() if method.name == name), seed)
    print(f"{name}, seed {seed}: {loss:.4f}", flush=True)
    return loss


def write(losses: Losses) -> str:
    """``learning.md`` and ``learning.csv``; returns the text."""
    config, seeds = TASK.config, len(next(iter(losses.values())))
    about = (
        f"Final validation loss (nats per byte) of a GPT ({config.layers} layers, width {config.width}, sequence "
        f"{config.sequence}) on the bytes of Python's standard library: {TASK.steps} steps of {TASK.batch} rows on "
        f"{RANKS} simulated ranks, {seeds} seeds of model and order of the text. What stands against Adam has Adam's "
        f"learning rates (peak {TASK.adam:g}), against LAMB, LAMB's (peak {TASK.lamb:g}). Variances are frozen after "
        f"{TASK.freeze} steps. “Seed spread” is the standard deviation over the seeds, “spreads” the difference of means in "
        "the larger one of the two spreads. "
        f"A method is held to 1 % of its reference; an ablation is called worse where it is by {_SPREADS} spreads."
    )
    lines = ["# Learning, measured by `python -m benchmarks.learning`", "", machine(), "", about, ""]
    lines += ["| | loss | seed spread | against | ratio | spreads | |", "|---|---|---|---|---|---|---|"]
    for method in methods():
        cells = [
            method.name,
            f"{statistics.fmean(losses[method.name]):.4f}",
            f"{statistics.stdev(losses[method.name]):.4f}",
        ]
        if method.against is None:
            cells += [""] * 4
        else:
            found = verdict(losses, method)
            cells += [method.against, f"{found.relative:.4f}", f"{found.spreads:+.1f}", found.told(method.ablation)]
        lines.append(f"| {' | '.join(cells)} |")
    text = "\n".join(lines) + "\n"
    rows = ([name, seed, f"{loss:.6f}"] for name, values in losses.items() for seed, loss in enumerate(values))
    results("learning.md").write_text(text)
    write_rows(results("learning.csv"), ["method", "seed", "loss"], rows)
    return text


def run(seeds: int = 3) -> str:
    """Measure and write ``results/learning``; returns the text."""
    return write(measure(seeds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="at least 2, for a spread")
    print(run(parser.parse_args().seeds))


if __name__ == "__main__":
    main()
