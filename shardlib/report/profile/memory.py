"""The memory of a rank's device over one step, byte by byte with names: leaves, units, activations by block, messages."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch

from shardlib.common.environment import within
from shardlib.common.optional import figures
from shardlib.execute.batches import as_tensors
from shardlib.optim.train_state import TrainState
from shardlib.plan.memory import memory_peaks
from shardlib.plan.plan import Plan
from shardlib.plan.tables import size, table
from shardlib.report.profile.names import Change, Name, Names, leaves_of_state, tensors_of
from shardlib.report.profile.picture import TEXT, WIDTH, saved
from shardlib.report.profile.recording import StepRecorder, TrainStep, require_steps
from shardlib.report.profile.timeline import Part

KINDS = {  # in the order in which they are drawn, from the bottom up
    "parameters": "#3b6ea8",
    "optimizer": "#4f8a55",
    "residuals": "#7a9a3a",
    "buffers": "#2f4b6e",
    "batch": "#6f6f6f",
    "gathered": "#7fb0de",
    "gradients": "#c8553d",
    "activations": "#d9902f",
    "computed again": "#e6bd7a",
    "backward": "#dd8f7f",
    "messages": "#8c6bb1",
    "update": "#8fc08f",
    "other": "#d0d0d0",
}
_COMPUTED = ("activations", "computed again", "backward")


@dataclass(frozen=True)
class Memory:
    """What `sl.report.memory` found. Printing it shows the moment of the peak.

    Attributes:
        changes: in order.
        planned: bytes of the peak that the plan says, and when; None for a plan that was not traced with an optimizer.
        state: the train state after the step.
    """

    changes: Sequence[Change] = field(repr=False)
    planned: tuple[int, str] | None
    state: Any = field(repr=False, compare=False)

    @cached_property
    def _peak(self) -> int:
        """The number of the change after which most is held."""
        levels = list(itertools.accumulate(change.bytes for change in self.changes))
        return max(range(len(levels)), key=levels.__getitem__)

    @property
    def peak(self) -> int:
        """The most bytes at once."""
        return sum(change.bytes for change in self.changes[: self._peak + 1])

    @property
    def when(self) -> Part:
        """The part of the step in which they were."""
        return self.changes[self._peak].part

    @cached_property
    def held(self) -> Mapping[Name, int]:
        """Name -> bytes at the peak, the most first."""
        held: Counter[Name] = Counter()
        for change in self.changes[: self._peak + 1]:
            held[change.name] += change.bytes
        return {name: count for name, count in held.most_common() if count}

    @property
    def by_kind(self) -> Mapping[str, int]:
        """Kind -> bytes at the peak."""
        kinds: Counter[str] = Counter()
        for name, count in self.held.items():
            kinds[name.kind] += count
        return {kind: kinds[kind] for kind in KINDS if kinds[kind]}

    @property
    def by_block(self) -> Mapping[str, int]:
        """Unit of a block -> bytes at the peak of what it computed, gradients of parameters left out."""
        blocks: Counter[str] = Counter()
        for name, count in self.held.items():
            if name.kind in _COMPUTED:
                blocks[name.of.partition(": ")[0]] += count
        return blocks

    @property
    def summary(self) -> str:
        """The peak, when it is reached, and what the plan says."""
        planned = f"; planned {size(self.planned[0])}, {self.planned[1]}" if self.planned else ""
        where = " ".join(filter(None, (self.when.way or self.when.kind, self.when.name)))
        return f"peak {size(self.peak)}, in {where}{planned}"

    def plot(self, path: str | Path) -> None:
        """Writes a PNG: bytes by kind over the step, with the plan's peak.

        Raises:
            MissingPackage: matplotlib is not installed; the message says what to install.
        """
        _draw(self, path)

    def __str__(self) -> str:
        kinds = [(kind, size(count), f"{count / self.peak:.1%}") for kind, count in self.by_kind.items()]
        names = [(name.kind, name.of, size(count), f"{count / self.peak:.1%}") for name, count in self.held.items()]
        more = f"\n… and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        return "\n\n".join(
            (
                self.summary,
                table(("kind", "bytes", ""), kinds, right=2),
                table(("kind", "of", "bytes", ""), names[:_SHOWN], right=2) + more,
            )
        )


_SHOWN = 30


def memory(train_step: TrainStep, state: TrainState, batch: Any, *, warm: int = 2, plan: Plan | None = None) -> Memory:
    """The memory of this rank's device over one step: every byte with a name, and what is held at the peak. Collective.

    Counted are storages of the state, the batch, and what operators make; an operator's internal workspace is not. The step
    takes longer than others, as every operator is looked at.

    Args:
        train_step, state: of `make_train_step`. The state is used up; the one after these steps is ``.state``.
        batch: this rank's share of a batch, which every step is given.
        warm: steps that come before: of the first ones, which are traced, memory differs.
        plan: the step's plan as `make_plan` makes it with ``loss_fn``, ``batch`` and ``optimizer``, for the planned peak.

    >>> loss_fn = lambda params, batch: (batch @ params["w"]).square().mean()
    >>> state, train_step = sl.make_train_step(loss_fn, {"w": torch.ones(64, 64)}, sl.optim.adam(0.1))
    >>> found = sl.report.memory(train_step, state, torch.ones(32, 64))
    >>> found.by_kind["parameters"], found.by_kind["optimizer"] >= 2 * 4 * 64 * 64
    (16384, True)
    """
    require_steps("report.memory", state, warm=warm, plan=plan)
    mesh = state.params.mesh
    batch = as_tensors(batch, mesh.device)  # as a step takes it
    for _ in range(warm):
        state, _ = train_step(state, batch)
    follower = StepRecorder(mesh)
    names = Names(follower.timeline, mesh.device, {bucket.label for bucket in state.params.plan.tiled.buckets})
    names.know(leaves_of_state(state))
    names.know(("batch", path, leaf, leaf.nbytes) for path, leaf in tensors_of(batch))
    with within(names=names.named), follower.installed(), names:
        state, _ = train_step(state, batch)
    follower.timeline.end()
    return Memory(names.kept(leaves_of_state(state)), _planned(plan, mesh.coords, batch), state)


def _planned(plan: Plan | None, coords: Mapping[str, int], batch: Any) -> tuple[int, str] | None:
    if plan is None or plan.peak_bytes is None or plan.needs is None:
        return None
    peak = memory_peaks(plan.at(coords), sum(leaf.nbytes for _, leaf in tensors_of(batch)))["device"]
    return peak.bytes, peak.when


def _draw(found: Memory, path: str | Path) -> None:
    Figure, FigureCanvasAgg = figures()
    figure = Figure(figsize=(WIDTH, 4.0), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    kinds = [kind for kind in KINDS if any(change.name.kind == kind for change in found.changes)]
    levels = {kind: [0] for kind in kinds}
    for change in found.changes:
        for kind, of_kind in levels.items():
            of_kind.append(of_kind[-1] + (change.bytes if change.name.kind == kind else 0))
    moments = range(len(found.changes) + 1)  # in order; time would show the cost of looking at operators
    stacks = [[level / 1e6 for level in levels[kind]] for kind in kinds]
    axes.stackplot(moments, stacks, labels=kinds, colors=[KINDS[kind] for kind in kinds], step="post", linewidth=0)
    if found.planned:
        axes.axhline(found.planned[0] / 1e6, color="#1c1c1c", linewidth=1, linestyle=(0, (4, 3)))
        axes.annotate(
            "planned peak", (0, found.planned[0] / 1e6), xytext=(4, 3), textcoords="offset points", fontsize=TEXT
        )
    axes.set_xlim(0, len(found.changes))
    axes.set_xlabel("allocations and frees in order", fontsize=TEXT)
    axes.set_ylabel("MB", fontsize=TEXT)
    axes.set_title(
        f"memory of a step by what it holds, at most {found.peak / 1e6:.1f} MB", fontsize=TEXT + 1, loc="left"
    )
    axes.tick_params(labelsize=TEXT, length=0)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", frameon=False, fontsize=TEXT, reverse=True)
    saved(figure, path)


# The floating-point operations per second that a device reaches at best.


_SIDES = (1024, 2048, 4096, 8192)  # of the matrices: the first that keeps the device for long enough
_LONG = 5e-3  # seconds
_ROUNDS = 5


def measure_peak(device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> float:
    """Floating-point operations per second of large products of matrices, with torch's present number of threads.

    Matrices of 1,024 rows, and twice as many while a product takes less than 5 ms, up to 8,192.

    The best of some rounds, measured once in a process for each device, dtype and number of threads.

    >>> sl.report.measure_peak() > 0
    True
    """
    return _measured(torch.device(device), dtype, torch.get_num_threads())


@cache
def _measured(device: torch.device, dtype: torch.dtype, threads: int) -> float:
    best = 0.0
    for side in _SIDES:
        seconds = _seconds(side, device, dtype)
        best = max(best, 2 * side**3 / seconds)
        if seconds >= _LONG:
            break
    return best


def _seconds(side: int, device: torch.device, dtype: torch.dtype) -> float:
    """Seconds of the quickest of some products."""
    a, b = (torch.ones(side, side, dtype=dtype, device=device) for _ in range(2))
    seconds = []
    for _ in range(_ROUNDS + 1):
        _settle(device)
        start = time.perf_counter()
        a @ b
        _settle(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def _settle(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
