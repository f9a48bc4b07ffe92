"""What all transforms of a chain say together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from shardlib.plan.claims import SECOND, AxisUse, Claim, LeafInfo, Live, Reduce, Step, Use

Slot = tuple[type[Claim], str, str]  # kind of claim, subject, slot


@dataclass(frozen=True)
class Home:
    """Where the tensors of one role live: the axes they are split over, in no order, and the memory."""

    axes: frozenset[str] = frozenset()
    memory: str = "device"


@dataclass(frozen=True)
class Resolved:
    """What all transforms say together.

    Attributes:
        sizes: axis -> size of the mesh.
        leaves: what they speak of.
        uses: path -> everything that is said of a leaf.
        reductions: axis -> everything that is said of it; "*" of every axis.
        homes: role -> where its tensors live.
        step: everything that is said of the step.
        axes: axis -> what it is used for, and by which transform.
        written: the transforms' names, with the slots that each has filled.
        notes: what came of it that a reader of the plan should know.
    """

    sizes: Mapping[str, int]
    leaves: tuple[LeafInfo, ...]
    uses: Mapping[str, Use] = field(default_factory=dict)
    reductions: Mapping[str, Reduce] = field(default_factory=dict)
    homes: Mapping[str, Home] = field(default_factory=dict)
    step: Step = field(default_factory=Step)
    axes: Mapping[str, Mapping[AxisUse, str]] = field(default_factory=dict)
    written: Mapping[str, tuple[tuple[Slot, Any], ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def use(self, path: str) -> Use:
        """What is said of a leaf."""
        return self.uses.get(path) or Use(path)

    def home(self, role: str) -> Home:
        """Where the tensors of a role live."""
        return self.homes.get(role) or Home()

    def dtype(self, leaf: LeafInfo) -> torch.dtype:
        """The dtype that a leaf is stored and used in."""
        return self.use(leaf.path).dtype or leaf.dtype

    @cached_property
    def sliced_axes(self) -> frozenset[str]:
        """The axes over which leaves are slices where they are used."""
        return frozenset(axis for use in self.uses.values() if use.spec is not None for axis in use.spec.axes)

    def varies_over(self, axis: str) -> bool:
        """Whether the batch varies over the axis."""
        return axis in self.reductions and self.reductions[axis].method is not None

    def of_axes(self, name: str) -> dict[str, Any]:
        """Axis -> one slot of what is said of it, of axes with several ranks."""
        found = {axis: getattr(reduce, name) for axis, reduce in self.reductions.items() if axis != "*"}
        return {axis: value for axis, value in found.items() if value is not None and self.sizes[axis] > 1}

    @cached_property
    def log(self) -> tuple[str, ...]:
        """A line for each transform that wrote anything, then the notes."""
        return (*(f"{name}: {_summary(found)}" for name, found in sorted(self.written.items())), *self.notes)

    def noting(self, notes: Iterable[str]) -> Resolved:
        """The same with more notes."""
        return replace(self, notes=(*self.notes, *notes))


def show(value: Any) -> str:
    """A claimed value, as printed."""
    # A function by its name: ranks compare this text, and an address is a process's own.
    return str(getattr(value, "__qualname__", value)).removeprefix("torch.")


_REDUCTIONS = {
    "method": "reduces over axis {axis!r} by {value}",
    "dtype": "reduces in {value}",
    "codec": "gradients travel over axis {axis!r} in {value}",
    "gathered": "parameters travel over axis {axis!r} in {value}",
    "owner": "sums gradients over axis {axis!r} itself, at steps that it chooses: {value.codec}",
}


def _summary(found: Sequence[tuple[Slot, Any]]) -> str:
    """One line: claims on many leaves are counted, splits gathered by axis, the rest spelled out."""
    uses: dict[str, int] = {}
    splits: dict[str, list[str]] = {}
    lines = []
    for (kind, subject, name), value in found:
        if kind is Use:
            said = f"{name}={show(value)}"
            uses[said] = uses.get(said, 0) + 1
        elif kind is Live and name == "memory":
            lines.append(f"{subject} in {value} memory")
        elif kind is Live and subject == SECOND:
            lines.append(f"keeps a second shard of parameters over axis {value!r}")
        elif kind is Live:
            splits.setdefault(value, []).append(subject)
        elif kind is Reduce:
            shown = value if name == "owner" else show(value)
            lines.append(_REDUCTIONS[name].format(axis=subject, value=shown))
        else:
            lines.append(f"{name}={show(value)}")
    lines += [f"splits {', '.join(roles)} over axis {axis!r}" for axis, roles in splits.items()]
    lines += [f"{said} on {count} leaves" for said, count in uses.items()]
    return "; ".join(lines)
