"""Steps over slow links as a table, the targets, and a plot, all from the samples."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness import tables
from benchmarks.harness.case import Result
from benchmarks.harness.plots import figure
from benchmarks.harness.timing import Ratio, ratio
from benchmarks.network.methods import ADAM, ONEBIT, methods

ALONE, RAW = "compute alone", "raw transfer"
_ABOUT = (
    "One training step of the 34M-parameter GPT of `make bench`, fp32, one thread a rank, a rank in each network namespace: "
    "two joined by a veth pair, four by a bridge; both ends of every link are shaped by tbf. Within a round every method "
    "takes its turn. “MB sent” is one rank's payload per step, “sum” is compute + payload / rate: a step on a mesh "
    "of one on all ranks at once, and the rate of raw gloo transfers. Two cores compute for all ranks. Medians; ratios are "
    "medians over the rounds."
)
_TICKS = (1, 2, 5, 10, 20)
_RATES = {"100mbit": "100 Mbit/s", "1gbit": "1 Gbit/s", "unlimited": "no limit"}


class Sample(NamedTuple):
    """One round of a method: seconds and payload bytes per step of one rank."""

    ranks: int
    rate: str
    method: str
    round: int
    seconds: float
    payload: float


class Cell(NamedTuple):
    """One method on one network: medians of seconds per step, and ratios round by round.

    ``serial`` is compute + payload / rate, with the step on a mesh of one and a raw transfer's rate.
    """

    seconds: float
    serial: float
    over_serial: Ratio
    over_adam: Ratio
    payload: float


Cells = dict[tuple[int, str, str], Cell]  # (ranks, rate, method)


class Target(NamedTuple):
    text: str
    aim: str
    found: str
    met: bool


def evaluate(samples: list[Sample]) -> Cells:
    """The cells of all methods and networks that were measured."""
    found: dict[tuple[int, str, str], list[Sample]] = {}
    for sample in samples:
        found.setdefault((sample.ranks, sample.rate, sample.method), []).append(sample)
    cells = {}
    for (ranks, rate, method), rounds in found.items():
        if method in (ALONE, RAW):
            continue
        alone, adam = (_seconds(found[ranks, rate, name]) for name in (ALONE, ADAM))
        payload = statistics.median(sample.payload for sample in rounds)
        wire = payload / _rate(found[ranks, rate, RAW])
        seconds, serial = _seconds(rounds), [compute + wire for compute in alone]
        medians = statistics.median(seconds), statistics.median(serial)
        cells[ranks, rate, method] = Cell(*medians, ratio(seconds, serial), ratio(seconds, adam), payload)
    return cells


def targets(cells: Cells) -> list[Target]:
    """The targets of the compressed phase of 1-bit Adam, for every number of ranks that was measured."""
    found = []
    for ranks in sorted({ranks for ranks, _, method in cells if method == ONEBIT}):
        slow, fast = cells[ranks, "100mbit", ONEBIT], cells[ranks, "unlimited", ONEBIT]
        faster, bound, slower = 1 / slow.over_adam.median, slow.over_serial.median, fast.over_adam.median
        where = f"{ranks} ranks, {ONEBIT}"
        found += [
            Target(f"{where}: Adam / this at 100 Mbit/s", "≥ 6", f"{faster:.2f}", faster >= 6),
            Target(f"{where}: this / (compute + payload / rate) at 100 Mbit/s", "≤ 1.2", f"{bound:.3f}", bound <= 1.2),
            Target(f"{where}: this / Adam without a limit", "≤ 1.15", f"{slower:.3f}", slower <= 1.15),
        ]
    return found


def _seconds(rounds: list[Sample]) -> list[float]:
    return [sample.seconds for sample in rounds]


def _rate(transfers: list[Sample]) -> float:
    """Bytes per second."""
    return statistics.median(sample.payload / sample.seconds for sample in transfers)


def result(samples: list[Sample]) -> Result:
    """The result for the samples of one number of ranks."""
    cells = evaluate(samples)
    sizes = sorted({ranks for ranks, _, _ in cells})
    names = [f"{name}: {column}" for name in _RATES.values() for column in ("s", "sum", "Adam / this")]
    rows = []
    for ranks in sizes:
        for method in methods():
            row = [cells[ranks, rate, method.name] for rate in _RATES if (ranks, rate, method.name) in cells]
            if row:
                found = [(f"{c.seconds:.3g}", f"{c.serial:.3g}", f"{1 / c.over_adam.median:.2f}") for c in row]
                rows.append(
                    [ranks, method.name, f"{row[0].payload / 1e6:.2f}", *(cell for each in found for cell in each)]
                )
    lines = [*(f"- {line}" for line in _networks(samples)), ""]
    lines += [*tables.grid(["ranks", "method", "MB sent", *names], rows), ""]
    verdicts = [[t.text, t.aim, t.found, "met" if t.met else "missed"] for t in targets(cells)]
    lines += [*tables.grid(["target", "aim", "found", ""], verdicts), ""]
    lines += tables.grid(["method", "setting"], [[method.name, method.setting] for method in methods()])
    title = f"{' and '.join(map(str, sizes))} hosts"
    return Result(tables.section(title, _ABOUT, lines), Sample._fields, [tuple(sample) for sample in samples])


def _networks(samples: list[Sample]) -> list[str]:
    """A line on the measured rates of the links, and on the number of rounds."""
    lines = []
    for ranks in sorted({sample.ranks for sample in samples}):
        for rate, name in _RATES.items():
            here = [sample for sample in samples if (sample.ranks, sample.rate) == (ranks, rate)]
            if not here:
                continue
            raw = _rate([sample for sample in here if sample.method == RAW]) * 8 / 1e6
            compute = statistics.median(_seconds([sample for sample in here if sample.method == ALONE]))
            rounds = 1 + max(sample.round for sample in here if sample.method == ALONE)
            turns = f"{rounds} round{'s' * (rounds > 1)}"
            lines.append(f"{ranks} ranks, {name}: raw transfers at {raw:,.0f} Mbit/s, compute {compute:.2f} s, {turns}")
    return lines


def plot(path: Path, results: list[Result]) -> None:
    """Draws a panel for every number of ranks."""
    cells = evaluate([Sample(*row) for result in results for row in result.samples])
    sizes = sorted({ranks for ranks, _, _ in cells})
    rates = [rate for rate in _RATES if any(rate == known for _, known, _ in cells)]
    names = [method.name for method in methods() if any(name == method.name for _, _, name in cells)]
    made = figure(5.5 * len(sizes), 4.2)
    panels = made.subplots(1, len(sizes), sharey=True, squeeze=False)[0]
    width = 0.8 / len(names)
    for axes, ranks in zip(panels, sizes):
        for index, name in enumerate(names):
            row = [cells[ranks, rate, name] for rate in rates]
            middles = [group + (index - (len(names) - 1) / 2) * width for group in range(len(rates))]
            axes.bar(middles, [cell.seconds for cell in row], 0.92 * width, label=name, color=f"C{index}")
            edges = [middle - width / 2 for middle in middles], [middle + width / 2 for middle in middles]
            axes.hlines([cell.serial for cell in row], *edges, color="black", linewidth=1.2)
        axes.set(title=f"{ranks} ranks", yscale="log")
        axes.set_yticks(_TICKS, map(str, _TICKS))
        axes.set_xticks(range(len(rates)), [_RATES[rate] for rate in rates])
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("seconds per step; black: compute + payload / rate")
    panels[-1].legend(frameon=False, fontsize=8)
    made.savefig(path)
