"""The memory of a rank's device over one step, byte by byte with names: leaves, units, activations by block, messages."""

from __future__ import annotations

import itertools
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shardlib.common._compat import OperatorMode, storage_id
from shardlib.common.display.colours import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILLION, YELLOW, mixed
from shardlib.common.display.panels import Fold, Grid, Panel, Picture, Shown, Title
from shardlib.common.display.svg import area_chart
from shardlib.common.environment import within
from shardlib.common.optional import new_figure, save_figure
from shardlib.execute.batches import as_tensors
from shardlib.mesh.transport.activity import here
from shardlib.optim.train_state import TrainState
from shardlib.plan.memory import memory_peaks
from shardlib.plan.plan import Plan
from shardlib.plan.tables import size, table
from shardlib.report.profile.picture import TEXT, WIDTH, plain
from shardlib.report.profile.recording import StepRecorder, TrainStep, require_steps
from shardlib.report.profile.timeline import Part, StepTimeline
from shardlib.tree import flatten, leaves_of

KINDS = {  # in the order in which they are drawn, from the bottom up
    "parameters": BLUE,
    "optimizer": GREEN,
    "residuals": YELLOW,
    "buffers": "#555555",
    "batch": GREY,
    "gathered": SKY,
    "gradients": VERMILLION,
    "activations": ORANGE,
    "computed again": mixed(ORANGE, 0.5),
    "backward": mixed(VERMILLION, 0.5),
    "messages": PURPLE,
    "update": mixed(GREEN, 0.5),
    "other": "#cccccc",
}
_COMPUTED = ("activations", "computed again", "backward")
_GRADIENT = "the gradient of "


class Name(NamedTuple):
    """What some bytes are for.

    Attributes:
        kind: one of `KINDS`. "gathered" parameters and "gradients" are of units, "activations"
            are what forward computes, "computed again" what a checkpoint does, "backward" what backward computes beside
            gradients of parameters; "other" is what the step makes for itself.
        of: the leaf's path, the unit, the block's unit with the name of the value (`sl.nn.checkpoint_name`) if it has one, or
            what a message is for.
    """

    kind: str
    of: str


class Change(NamedTuple):
    """Bytes that came to be, or, below 0, went.

    Attributes:
        when: seconds from the beginning of the step; 0 for what was there.
        part: the part of the step that ran.
    """

    when: float
    name: Name
    bytes: int
    part: Part


Known = Iterator[tuple[str, str, torch.Tensor, int]]  # kind, name, a tensor, and how many bytes of its storage


def leaves_of_state(state: TrainState) -> Known:
    """Every leaf of a state, those in flat buffers by their own paths."""
    plan = state.params.plan
    for bucket in plan.buckets:
        if bucket.name in state.params.in_memory:
            buffer = state.params.in_memory[bucket.name]
            for path, elements in zip(bucket.paths, bucket.segment_sizes(bucket.param_level), strict=True):
                yield "parameters", path, buffer, elements * buffer.itemsize
    flat = {bucket.name: bucket for bucket in plan.trained}
    for path, leaf in tensors_of(state.opt._asdict()):
        name = max((name for name in flat if path.endswith(f"/{name}")), key=len, default=None)
        if name is None or leaf.numel() != flat[name].owned:
            yield "optimizer", path, leaf, leaf.nbytes
            continue
        what = path.removesuffix(f"/{name}")
        for leaf_path, elements in zip(flat[name].paths, flat[name].segment_sizes(flat[name].levels), strict=True):
            yield "optimizer", f"{what}/{leaf_path}", leaf, elements * leaf.itemsize
    for path, leaf in tensors_of(state.comm):
        yield "residuals", path, leaf, leaf.nbytes
    for path, leaf in tensors_of(state.buffers):
        yield "buffers", path, leaf, leaf.nbytes


def tensors_of(tree: Any) -> list[tuple[str, torch.Tensor]]:
    """The tensors of a pytree with their paths."""
    paths, leaves, _ = flatten(tree)
    return [(path, leaf) for path, leaf in zip(paths, leaves, strict=True) if isinstance(leaf, torch.Tensor)]


class Names(OperatorMode):
    """Notes storages of one device as they come and go, with names.

    Args:
        units: what buckets are called in the names of their gathers.
    """

    def __init__(self, timeline: StepTimeline, device: torch.device, units: set[str]) -> None:
        super().__init__()
        self._timeline, self._device, self._units = timeline, device, units
        self.changes: list[Change] = []
        self._alive: dict[int, list[tuple[Name, int]]] = {}  # identity of a storage -> its names with their bytes
        self._made: dict[int, int] = {}  # identity of a storage that the step has made -> the number of that change

    def know(self, leaves: Known) -> None:
        """Note tensors that are there."""
        for key, (storage, names) in self._by_storage(leaves).items():
            if key not in self._alive:
                self._alive[key] = []
                weakref.finalize(storage, self._free, key)
                for name, count in names:
                    self._add(key, name, count)

    def kept(self, leaves: Known) -> list[Change]:
        """The changes, with what the step has made for the state after it under the names of that state's leaves."""
        changes = [[change] for change in self.changes]
        for key, (_, names) in self._by_storage(leaves).items():
            number = self._made.get(key)
            if number is not None and self.changes[number].name.kind in ("update", "other"):
                changes[number] = [self.changes[number]._replace(name=name, bytes=count) for name, count in names]
        return list(itertools.chain(*changes))

    def _by_storage(self, leaves: Known) -> dict[int, tuple[torch.UntypedStorage, list[tuple[Name, int]]]]:
        """Identity of a storage -> it, and its names with their bytes. What it has beyond its leaves is the last one's:
        padding, or what that is a view of."""
        found: dict[int, tuple[torch.UntypedStorage, list[tuple[Name, int]]]] = {}
        left: dict[int, int] = {}  # bytes without a name
        for kind, of, tensor, count in leaves:
            if self._counts(tensor):
                storage = tensor.untyped_storage()
                key = storage_id(storage)
                named = min(count, left.setdefault(key, storage.nbytes()))
                found.setdefault(key, (storage, []))[1].append((Name(kind, of), named))
                left[key] -= named
        for key, unnamed in left.items():
            name, count = found[key][1][-1]
            found[key][1][-1] = name, count + unnamed
        return found

    def named(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """Meet a value that the model names."""
        held = self._alive.get(storage_id(x.untyped_storage())) if self._counts(x) else None
        if held and held[0][0].kind in ("activations", "computed again"):
            (before, count), part = held[0], self._timeline.now
            after = Name(before.kind, f"{before.of}: {name}")
            held[0] = after, count
            self.changes += [self._change(before, -count, part), self._change(after, count, part)]
        return x

    def _take(self, operator: Any, args: Any, kwargs: Any) -> Any:
        for value in leaves_of((args, kwargs)):
            self._meet(value, made=False)
        result = operator(*args, **kwargs)
        for value in leaves_of(result):
            self._meet(value, made=True)
        return result

    def _meet(self, value: Any, made: bool) -> None:
        """Note what an operator has made; what it was given and nobody has made is there anyway, as constants are that a loss
        function closes over, and so are views of it."""
        if not isinstance(value, torch.Tensor) or not self._counts(value):
            return
        storage = value.untyped_storage()
        if (key := storage_id(storage)) not in self._alive:
            self._alive[key] = []
            if made:
                self._made[key] = len(self.changes)
                self._add(key, self._name(), storage.nbytes())
            weakref.finalize(storage, self._free, key)

    def _counts(self, tensor: torch.Tensor) -> bool:
        return tensor.layout is torch.strided and tensor.device.type == self._device.type

    def _name(self) -> Name:
        """The name of what is made now: by what an exchange or a unit's gradient is for, or by the part of the step."""
        path, part = here().path, self._timeline.now
        if path in self._units:
            return Name("gathered", path)
        if path.startswith(_GRADIENT):
            return Name("gradients", path.removeprefix(_GRADIENT))
        if part.kind == "compute":
            kind = {"forward": "activations", "recompute": "computed again"}.get(part.way, part.way)
            return Name(kind, part.name)
        if part.kind == "optimizer" or path == "the optimizer":
            return Name("update", part.name or "the optimizer")
        return Name("messages", path) if path or part.kind in ("communication", "wait") else Name("other", part.kind)

    def _add(self, key: int, name: Name, count: int) -> None:
        self._alive[key].append((name, count))
        self.changes.append(self._change(name, count, self._timeline.now))

    def _free(self, key: int) -> None:
        part = self._timeline.now
        self._made.pop(key, None)
        self.changes += [self._change(name, -count, part) for name, count in self._alive.pop(key)]

    def _change(self, name: Name, count: int, part: Part) -> Change:
        return Change(time.perf_counter() - self._timeline.began, name, count, part)


@dataclass(frozen=True)
class Memory(Shown):
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
        tables = [table(grid.header, grid.rows, grid.right) for grid in self._grids()]
        more = f"\n… and {len(self.held) - _SHOWN} more" if len(self.held) > _SHOWN else ""
        return "\n\n".join((self.summary, *tables)) + more

    def _grids(self) -> Iterator[Grid]:
        kinds = [(kind, size(count), f"{count / self.peak:.1%}") for kind, count in self.by_kind.items()]
        yield Grid(("kind", "bytes", ""), kinds, 2, "At the peak, by kind")
        names = [(name.kind, name.of, size(count), f"{count / self.peak:.1%}") for name, count in self.held.items()]
        yield Grid(("kind", "of", "bytes", ""), names[:_SHOWN], 2, "At the peak", more=max(len(names) - _SHOWN, 0))

    def shown(self) -> Iterator[Panel]:
        """What a notebook and a terminal show: bytes over the step, and what is held at the peak."""
        yield Title(f"Memory of a step: {self.summary}")
        layers = {kind: [float(level) for level in levels] for kind, levels in levels_of(self).items()}
        planned = {"planned peak": float(self.planned[0])} if self.planned else None
        names = ("allocations and frees in order", "bytes held")
        title = f"memory of a step by what it holds, at most {size(self.peak)}"
        svg = area_chart(layers, KINDS, names, title, y_format=lambda held: size(round(held)), levels=planned)
        yield Picture(svg, self.summary, {kind: KINDS[kind] for kind in reversed(layers)})
        by_kind, by_name = self._grids()
        yield by_kind
        yield Fold(f"By name ({len(self.held)})", [by_name])


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


def levels_of(found: Memory) -> dict[str, list[int]]:
    """Kind -> bytes held before the first change and after each one."""
    levels: dict[str, list[int]] = {}
    now = dict.fromkeys((kind for kind in KINDS if any(change.name.kind == kind for change in found.changes)), 0)
    for kind in now:
        levels[kind] = [0]
    for change in found.changes:
        now[change.name.kind] += change.bytes
        for kind, held in now.items():
            levels[kind].append(held)
    return levels


def _draw(found: Memory, path: str | Path) -> None:
    figure = new_figure(WIDTH, 4.0)
    axes = figure.subplots()
    levels = levels_of(found)
    kinds = list(levels)
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
    plain(axes)
    figure.legend(loc="outside right upper", frameon=False, fontsize=TEXT, reverse=True)
    save_figure(figure, path)
