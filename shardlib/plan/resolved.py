"""The resolved claims of all transforms of a chain."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from shardlib.plan.claims import SECOND, AxisUse, Claim, LeafInfo, Live, Reduce, Step, Use

Slot = tuple[type[Claim], str, str]  # kind of claim, subject, slot


@dataclass(frozen=True)
class Location:
    """Where the tensors of one role live: the axes they are split over, in no order; the memory; the share of their bytes in
    it; the folders of their files."""

    axes: frozenset[str] = frozenset()
    memory: str = "device"
    share: float = 1.0
    folders: tuple[str, ...] = ()


@dataclass(frozen=True)
class Resolved:
    """The merged claims of all transforms of a chain.

    Attributes:
        sizes: axis name -> size of the mesh.
        leaves: the parameters.
        uses: path -> claims on the leaf.
        reductions: axis -> claims on the axis; "*" -> claims on every axis.
        locations: role -> where its tensors live.
        step: claims on the step.
        axes: axis -> its uses, each with the name of the transform.
        written: name of a transform -> the slots it filled, with their values.
        notes: lines for the plan's log.
    """

    sizes: Mapping[str, int]
    leaves: tuple[LeafInfo, ...]
    uses: Mapping[str, Use] = field(default_factory=dict)
    reductions: Mapping[str, Reduce] = field(default_factory=dict)
    locations: Mapping[str, Location] = field(default_factory=dict)
    step: Step = field(default_factory=Step)
    axes: Mapping[str, Mapping[AxisUse, str]] = field(default_factory=dict)
    written: Mapping[str, tuple[tuple[Slot, Any], ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def use(self, path: str) -> Use:
        """The claims on a leaf."""
        return self.uses.get(path) or Use(path)

    def location(self, role: str) -> Location:
        """Where the tensors of a role live."""
        return self.locations.get(role) or Location()

    def dtype(self, leaf: LeafInfo) -> torch.dtype:
        """The dtype in which a leaf is stored and used."""
        return self.use(leaf.path).dtype or leaf.dtype

    @cached_property
    def sliced_axes(self) -> frozenset[str]:
        """The axes over which leaves are sliced in the loss."""
        return frozenset(axis for use in self.uses.values() if use.spec is not None for axis in use.spec.axes)

    def varies_over(self, axis: str) -> bool:
        """Whether the batch varies over the axis."""
        return any(use.varies for use in self.axes.get(axis, ()))

    def of_axes(self, name: str) -> dict[str, Any]:
        """Axis -> the value of slot ``name``, for axes with several ranks on which it is claimed, or that are summed if it
        is claimed for every axis."""
        values = {}
        for axis in self.sizes:
            value = getattr(self.reductions.get(axis), name, None)
            values[axis] = self.everywhere(name) if value is None and self.varies_over(axis) else value
        return {axis: value for axis, value in values.items() if value is not None and self.sizes[axis] > 1}

    def everywhere(self, name: str) -> Any:
        """The value of slot ``name`` that is claimed for every axis, or None."""
        return getattr(self.reductions.get("*"), name, None)

    @cached_property
    def log(self) -> tuple[str, ...]:
        """A line for each transform that filled a slot, then the notes."""
        return (*(f"{name}: {_summary(slots)}" for name, slots in sorted(self.written.items())), *self.notes)

    def without_owner(self) -> Resolved:
        """A copy without what an optimizer claims."""
        kept = {name: tuple(pair for pair in pairs if pair[0][2] != "owner") for name, pairs in self.written.items()}
        reductions = {axis: replace(claim, owner=None) for axis, claim in self.reductions.items()}
        return replace(self, written={name: pairs for name, pairs in kept.items() if pairs}, reductions=reductions)

    def noting(self, notes: Iterable[str]) -> Resolved:
        """A copy with more notes."""
        return replace(self, notes=(*self.notes, *notes))


def show(value: Any) -> str:
    """A claimed value, as printed."""
    # A function is shown by its name: ranks compare this text, and a function's repr has an address of one process.
    return str(getattr(value, "__qualname__", value)).removeprefix("torch.")


_REDUCTIONS = {
    "method": "reduces over {axis} by {value}",
    "dtype": "reduces in {value}",
    "codec": "gradients travel over {axis} in {value}",
    "gathered": "parameters travel over {axis} in {value}",
    "owner": "sums gradients over {axis} itself, at steps that it chooses: {value.codec}",
    "summation": "sums losses and norms {value}",
}


def _summary(slots: Sequence[tuple[Slot, Any]]) -> str:
    """One line on the slots of one transform: claims on leaves are counted, splits are grouped by axis."""
    uses: dict[str, int] = {}
    splits: dict[str, list[str]] = {}
    lines = []
    for (kind, subject, name), value in slots:
        if kind is Use:
            text = f"{name}={show(value)}"
            uses[text] = uses.get(text, 0) + 1
        elif kind is Live and name == "memory":
            lines.append(f"{subject} in {value} memory")
        elif kind is Live and name == "folders":
            lines.append(f"files in {', '.join(value)}")
        elif kind is Live and name == "share":
            lines.append(f"{value:.0%} of {subject} there")
        elif kind is Live and subject == SECOND:
            lines.append(f"keeps a second shard of parameters over axis {value!r}")
        elif kind is Live:
            splits.setdefault(value, []).append(subject)
        elif kind is Reduce:
            shown = value if name == "owner" else show(value)
            axis = "every axis" if subject == "*" else f"axis {subject!r}"
            lines.append(_REDUCTIONS[name].format(axis=axis, value=shown))
        else:
            lines.append(f"{name}={show(value)}")
    lines += [f"splits {', '.join(roles)} over axis {axis!r}" for axis, roles in splits.items()]
    lines += [f"{text} on {count} leaves" for text, count in uses.items()]
    return "; ".join(lines)
