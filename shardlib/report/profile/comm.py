"""Who waits for whom: the exchanges of a step, with bytes, times and bandwidths; and the rank that is late, and in what."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from shardlib.common.display.colours import PALETTE, mixed
from shardlib.common.display.panels import Grid, Panel, Picture, Shown, Title
from shardlib.common.display.svg import SpanChart, TimeSpan
from shardlib.common.optional import new_figure, save_figure
from shardlib.mesh.mesh import coordinates
from shardlib.plan.tables import size, table
from shardlib.report.profile.exchanges import GroupExchange, meetings
from shardlib.report.profile.picture import TEXT, WIDTH, plain
from shardlib.report.profile.recording import Recorded, RecordedStep, TrainStep, record, require_steps


@dataclass(frozen=True)
class Line:
    """The exchanges of one name in a step: one line of the table.

    Attributes:
        name: what they are for.
        op: the operation.
        axis: the mesh axis.
        calls: how many there are, of all groups of ranks.
        payload: bytes that one rank sends in one of them.
        seconds: median time from the last rank's arrival to the first result.
        waited: the longest that a rank waited for one of them.
        last: the rank that came last most often.
        late: median seconds by which the last rank came after the first.
    """

    name: str
    op: str
    axis: str
    calls: int
    payload: int
    seconds: float
    waited: float
    last: int
    late: float

    @property
    def bandwidth(self) -> float | None:
        """Bytes per second of one rank; None if no rank waited for a result."""
        return self.payload / self.seconds if self.seconds else None


@dataclass(frozen=True)
class Comm(Recorded, Shown):
    """What `sl.report.comm` found: the exchanges of one step. Printing it shows a table."""

    @cached_property
    def meetings(self) -> Sequence[GroupExchange]:
        """Every exchange, as all of its ranks made it, in the order in which they began."""
        return meetings(self.recording.sizes, [steps[-1].exchanges for steps in self.recording.ranks])

    @cached_property
    def lines(self) -> Sequence[Line]:
        """The exchanges by name, in the order in which they first began."""
        named: dict[tuple[str, str, str], list[GroupExchange]] = {}
        for meeting in self.meetings:
            named.setdefault((meeting.name, meeting.op, meeting.first.axis), []).append(meeting)
        return [
            Line(
                *key,
                len(found),
                max(meeting.payload for meeting in found),
                statistics.median(meeting.seconds for meeting in found),
                max(meeting.waited for meeting in found),
                Counter(meeting.last for meeting in found).most_common(1)[0][0],
                statistics.median(meeting.late for meeting in found),
            )
            for key, found in named.items()
        ]

    @property
    def payload(self) -> Mapping[str, int]:
        """Axis -> bytes that a rank sends in the step, of the ranks the most, as `Plan.payload` counts them."""
        totals: Counter[str] = Counter()
        for steps in self.recording.ranks:
            sent: Counter[str] = Counter()
            for exchange in steps[-1].exchanges:
                sent[exchange.axis] += exchange.payload
            totals |= sent
        return {axis: totals[axis] for axis, ways in self.recording.sizes.items() if ways > 1}

    def plot(self, path: str | Path) -> None:
        """Writes a PNG: the exchanges of every rank on one time axis, pale until the last rank has come.

        Raises:
            MissingPackage: matplotlib is not installed; the message says what to install.
        """
        _draw(self, path)

    @property
    def colours(self) -> Mapping[str, str]:
        """Axis -> its colour in pictures."""
        return dict(zip(self.payload, PALETTE))

    def __str__(self) -> str:
        grid = self._grid()
        return f"{self._sent}\n\n{table(grid.header, grid.rows, grid.right)}"

    @property
    def _sent(self) -> str:
        sent = ", ".join(f"{size(count)} on {axis}" for axis, count in self.payload.items()) or "nothing"
        return f"a rank sends {sent} in a step"

    def _grid(self) -> Grid:
        rows = [
            (
                line.name, line.op, line.axis, str(line.calls), size(line.payload), f"{1e3 * line.seconds:.2f}",
                f"{line.bandwidth / 1e9:.3g}" if line.bandwidth and line.payload else "",
                f"{1e3 * line.waited:.2f}", f"rank {line.last}", f"{1e3 * line.late:.2f}",
            )
            for line in self.lines
        ]  # fmt: skip
        header = ("exchange", "op", "axis", "calls", "bytes", "ms", "GB/s", "waited, ms", "last", "late, ms")
        return Grid(header, rows, 7)

    def shown(self) -> Iterator[Panel]:
        """What a notebook and a terminal show: every rank's exchanges on one time axis, and their table."""
        yield Title(f"Exchanges: {self._sent}")
        yield _picture(self)
        yield self._grid()


def comm(train_step: TrainStep, state: Any, batch: Any, *, warm: int = 2) -> Comm:
    """The exchanges of one step: bytes, time, bandwidth, and which rank the others waited for. Collective.

    An exchange's time runs from the arrival of its last rank until the first rank had its result, by the ranks' common clock.
    A rank that asks for a result late learns only then that it is there, so times are upper bounds and bandwidths lower ones
    where nobody waited. Steps that are not reported on have no clock at all.

    Args:
        train_step, state: of `make_train_step`. The state is used up; the one after these steps is ``.state``.
        batch: this rank's share of a batch, which every step is given.
        warm: steps that come before the reported one.

    >>> state, train_step = sl.make_train_step(lambda p, x: (x @ p).square().mean(), torch.ones(4, 4), sl.optim.sgd(0.1))
    >>> sl.report.comm(train_step, state, torch.ones(2, 4)).lines  # one rank exchanges nothing
    []
    """
    require_steps("report.comm", state, warm=warm)
    state, recording = record(train_step, state, batch, 1, warm)
    return Comm(recording, state)


def _stretches(found: Comm) -> Iterator[tuple[int, str, str, tuple[float, float, float]]]:
    """Of each exchange and rank: the rank, the axis, the name, and when it began there, when the last rank came, its end; in
    seconds from the step's beginning."""
    began = min(steps[-1].began for steps in found.recording.ranks)
    for meeting in found.meetings:
        last = meeting.of[meeting.last].start
        for rank, exchange in meeting.of.items():
            times = exchange.start - began, last - began, max(last, exchange.end or last) - began
            yield rank, exchange.axis, meeting.name, times


def _picture(found: Comm) -> Picture:
    chart = SpanChart("exchanges of a step; pale until the last rank has come", "ms")
    rows: list[list[TimeSpan]] = [[] for _ in found.recording.ranks]
    for rank, axis, name, (start, last, end) in _stretches(found):
        hint = (
            f"rank {rank}, axis {axis}: {name}, waited {1e3 * (last - start):.3g} ms, then {1e3 * (end - last):.3g} ms"
        )
        rows[rank].append(TimeSpan(1e3 * start, 1e3 * last, mixed(found.colours[axis], 0.7), "", hint))
        rows[rank].append(TimeSpan(1e3 * last, 1e3 * end, found.colours[axis], "", hint))
    chart.rows += [(f"rank {rank}", spans) for rank, spans in enumerate(rows)]
    return Picture(chart.svg(), chart.title, found.colours)


def _draw(found: Comm, path: str | Path) -> None:
    ranks = len(found.recording.ranks)
    figure = new_figure(WIDTH, 1.7 + 0.5 * ranks)
    from matplotlib.patches import Patch

    axes = figure.subplots()
    for rank, axis, _, (start, last, end) in _stretches(found):
        for left, right, alpha in ((start, last, 0.3), (last, end, 0.9)):
            axes.barh(
                rank, 1e3 * (right - left), left=1e3 * left, height=0.8, alpha=alpha,
                color=found.colours[axis], edgecolor="white", linewidth=0.3,
            )  # fmt: skip
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)], fontsize=TEXT)
    axes.set_ylim(ranks - 0.5, -0.5)
    axes.set_xlabel("ms", fontsize=TEXT)
    axes.set_title("exchanges of a step; pale until the last rank has come", fontsize=TEXT + 1, loc="left")
    plain(axes)
    handles = [Patch(facecolor=colour, label=axis) for axis, colour in found.colours.items()]
    figure.legend(handles=handles, loc="outside upper right", ncols=len(handles) or 1, frameon=False, fontsize=TEXT)
    save_figure(figure, path)


_NOISE = 0.05  # of a step; ranks that differ by less are not called late


@dataclass(frozen=True)
class Lateness:
    """One rank's share of the steps, medians over them, in seconds.

    Attributes:
        busy: not waiting.
        waited: for other ranks, copies or disks.
        behind: by how much it was busy for longer than the median of the other ranks of its stage; below 0 if shorter.
        most: the part in which it exceeds them most: "forward", "backward", "recompute", "optimizer", ….
    """

    rank: int
    busy: float
    waited: float
    behind: float
    most: str


@dataclass(frozen=True)
class Stragglers(Recorded, Shown):
    """What `sl.report.stragglers` found. Printing it shows a table."""

    @cached_property
    def ranks(self) -> Sequence[Lateness]:
        """Every rank, in order."""
        parts = [_medians(steps) for steps in self.recording.ranks]
        places = [coordinates(self.recording.sizes, rank) for rank in range(len(parts))]
        stages = [[place[axis] for axis in self.recording.stages] for place in places]
        return [
            _compared(
                rank, mine, [of for other, of in enumerate(parts) if other != rank and stages[other] == stages[rank]]
            )
            for rank, mine in enumerate(parts)
        ]

    @property
    def late(self) -> Lateness | None:
        """The rank that the others wait for most; None if all are alike (within a twentieth of a step)."""
        worst = max(self.ranks, key=lambda rank: rank.behind)
        return worst if worst.behind > _NOISE * (worst.busy + worst.waited) else None

    def __str__(self) -> str:
        grid = self._grid()
        return f"{self._said}\n\n{table(grid.header, grid.rows)}"

    @property
    def _said(self) -> str:
        late = self.late
        said = (
            "no rank is late"
            if late is None
            else f"rank {late.rank} is late by {1e3 * late.behind:.2f} ms a step, most of it in {late.most}"
        )
        return f"{said} (medians of {len(self.recording.steps)} steps)"

    def _grid(self) -> Grid:
        rows = [
            (str(of.rank), f"{1e3 * of.busy:.2f}", f"{1e3 * of.waited:.2f}", f"{1e3 * of.behind:+.2f}", of.most)
            for of in self.ranks
        ]
        return Grid(("rank", "busy, ms", "waited, ms", "behind, ms", "most in"), rows)

    def shown(self) -> Iterator[Panel]:
        """What a notebook and a terminal show."""
        yield Title(f"Stragglers: {self._said}")
        yield self._grid()


def stragglers(train_step: TrainStep, state: Any, batch: Any, *, steps: int = 10, warm: int = 2) -> Stragglers:
    """Find the rank that is late, by how much, and in which part of the step, from what all compute and wait. Collective.

    Args:
        train_step, state: of `make_train_step`. The state is used up; the one after these steps is ``.state``.
        batch: this rank's share of a batch, which every step is given.
        steps: steps over which medians are taken.
        warm: steps before these.

    >>> state, train_step = sl.make_train_step(lambda p, x: (x @ p).square().mean(), torch.ones(4, 4), sl.optim.sgd(0.1))
    >>> print(sl.report.stragglers(train_step, state, torch.ones(2, 4)).late)
    None
    """
    require_steps("report.stragglers", state, steps, warm)
    state, recording = record(train_step, state, batch, steps, warm)
    return Stragglers(recording, state)


def _medians(steps: Sequence[RecordedStep]) -> Mapping[str, float]:
    """Seconds of each part, by its phase or kind."""
    taken: defaultdict[str, list[float]] = defaultdict(lambda: [0.0] * len(steps))
    for number, step in enumerate(steps):
        for part, seconds in step.own().items():
            taken[part.way if part.kind == "compute" else part.kind][number] += seconds
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def _compared(rank: int, mine: Mapping[str, float], others: Sequence[Mapping[str, float]]) -> Lateness:
    """A rank beside the others that compute what it does; without any it is like itself."""
    others = others or [mine]
    # Starting an exchange may wait too: a transport's own threads take turns with the sender.
    busy = [
        name
        for name in dict.fromkeys(name for of in (mine, *others) for name in of)
        if name not in ("wait", "communication")
    ]
    excess = {name: mine.get(name, 0.0) - statistics.median(of.get(name, 0.0) for of in others) for name in busy}
    total = sum(mine.get(name, 0.0) for name in busy)
    behind = total - statistics.median(sum(of.get(name, 0.0) for name in busy) for of in others)
    return Lateness(rank, total, mine.get("wait", 0.0), behind, max(excess, key=lambda name: excess[name]))
