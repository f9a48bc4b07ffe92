"""Transforms, values that claim parts of a plan; chains of them; and the claims of a chain merged into one record."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from shardlib.errors import IllegalComposition, listing
from shardlib.mesh.memories import MEMORIES
from shardlib.plan.claims import SECOND, AxisUse, Claim, LeafInfo, Live, Reduce, Step, Use
from shardlib.plan.tables import shortened

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


class Transform(ABC):
    """A value that contributes claims to a plan.

    Attributes:
        name: the transform as a user writes it, such as "zero(3, replicate='node')", for messages and the plan's log.
    """

    @property
    @abstractmethod
    def name(self) -> str: ...

    @abstractmethod
    def claims(self, sizes: Mapping[str, int], leaves: Sequence[LeafInfo]) -> Iterable[Claim]:
        """The claims on these leaves, for a mesh with axes of these sizes. Pure."""

    def over(self, axis: str, other: str) -> str:
        """The transform as a user writes it, with another axis in the place of one."""
        return self.name.replace(repr(axis), repr(other))

    def check(self, resolved: Resolved) -> None:  # noqa: B027  # most transforms depend on no other
        """Raise `IllegalComposition` if the claims of all transforms together do not suit this one."""


@dataclass(frozen=True, repr=False)
class Chain(Transform):
    """Several transforms as one. Every order of them gives the same plan."""

    transforms: tuple[Transform, ...]

    @property
    def name(self) -> str:
        return f"chain({', '.join(transform.name for transform in self.transforms)})"

    def __repr__(self) -> str:
        return f"sl.chain({', '.join(map(repr, self.transforms))})"

    def claims(self, sizes: Mapping[str, int], leaves: Sequence[LeafInfo]) -> Iterable[Claim]:
        for transform in self.transforms:
            yield from transform.claims(sizes, leaves)


def require_transform(given: Any) -> Transform:
    """What is given, which must be a transform.

    Raises:
        IllegalComposition: it is something else.
    """
    if isinstance(given, Transform):
        return given
    remedy = (
        "give several to shardlib.chain" if isinstance(given, (list, tuple)) else "a stage is stage=, or sl.zero(stage)"
    )
    raise IllegalComposition(f"{shortened(repr(given), 120)} is no transform, as sl.zero(...) makes one; {remedy}")


def chain(*transforms: Transform) -> Chain:
    """Compose transforms. Nested chains are flattened; the order does not matter.

    Raises:
        IllegalComposition: something that is no transform.

    >>> transforms = sl.zero(2), sl.precision("bf16"), sl.accumulate(4)
    >>> plan = sl.make_plan({"w": torch.ones(8, 8)}, sl.abstract_mesh(data=4), sl.chain(*transforms))
    >>> plan == sl.make_plan({"w": torch.ones(8, 8)}, sl.abstract_mesh(data=4), sl.chain(*reversed(transforms)))
    True
    """
    flat: list[Transform] = []
    for transform in map(require_transform, transforms):
        flat.extend(transform.transforms if isinstance(transform, Chain) else [transform])
    return Chain(tuple(flat))


def resolve(transform: Transform, sizes: Mapping[str, int], leaves: Sequence[LeafInfo]) -> Resolved:
    """Merge every claim; `check_axes` and the transforms' own checks come after.

    Raises:
        IllegalComposition: two transforms claim one slot; lists all of them.
    """
    return _merged(Resolved(dict(sizes), tuple(leaves)), members_of(transform))


def joined(resolved: Resolved, transform: Transform) -> Resolved:
    """``resolved`` with the claims of one more transform, whose check is run.

    Raises:
        IllegalComposition: the transform claims a slot that another one claimed, or its check fails.
    """
    merged = _merged(resolved, [transform])
    transform.check(merged)
    return merged


def members_of(transform: Transform) -> tuple[Transform, ...]:
    """The transforms of a chain, sorted by name."""
    members = transform.transforms if isinstance(transform, Chain) else (transform,)
    return tuple(sorted(members, key=lambda member: member.name))


def _merged(before: Resolved, members: Sequence[Transform]) -> Resolved:
    values: dict[Slot, Any] = {}
    writers: dict[Slot, str] = {}
    for name, pairs in before.written.items():
        for slot, value in pairs:
            values[slot] = slot[0].union(slot[2], values[slot], value) if slot in values else value
            writers[slot] = name
    written = {name: list(pairs) for name, pairs in before.written.items()}
    axes = {axis: dict(uses) for axis, uses in before.axes.items()}
    conflicts: dict[tuple[str, str], list[str]] = {}
    for member in members:
        writer = member.name  # which is code, and takes time to write
        for claim in member.claims(before.sizes, before.leaves):
            for axis, use in claim.axes():
                axes.setdefault(axis, {}).setdefault(use, writer)
            for name, value in claim.slots().items():
                slot = (type(claim), claim.subject, name)
                united = claim.union(name, values[slot], value) if slot in values else value
                if united is None:
                    what = claim.named(claim.subject, name)
                    both = "" if values[slot] == value else f": {show(values[slot])} against {show(value)}"
                    conflicts.setdefault((writers[slot], writer), []).append(what + both)
                    continue
                values[slot], writers[slot] = united, writer
                written.setdefault(writer, []).append((slot, value))
    if conflicts:
        raise IllegalComposition(
            "\n".join(
                f"{first} and {second} both claim\n{listing(claims, 5)}\n"
                "Keep one, with the arguments of both, or give them different axes."
                for (first, second), claims in conflicts.items()
            )
        )
    records: dict[type[Claim], dict[str, dict[str, Any]]] = {Use: {}, Reduce: {}, Live: {}, Step: {}}
    for (kind, subject, name), value in values.items():
        records[kind].setdefault(subject, {})[name] = value
    return replace(
        before,
        uses={path: Use(path, **slots) for path, slots in records[Use].items()},
        reductions={axis: Reduce(axis, **slots) for axis, slots in records[Reduce].items()},
        locations={role: _location(role, slots) for role, slots in records[Live].items()},
        step=Step(**records[Step].get("", {})),
        axes=axes,
        written={name: tuple(pairs) for name, pairs in written.items()},
    )


def _location(role: str, slots: Mapping[str, Any]) -> Location:
    memory, share = slots.get("memory", "device"), slots.get("share", 1.0)
    if memory not in MEMORIES:
        raise IllegalComposition(
            f"the {role} state cannot live in memory {memory!r}; use one of {', '.join(map(repr, MEMORIES))}"
        )
    axes = frozenset(axis for slot, axis in slots.items() if slot not in Live.PLACES)
    return Location(axes, memory, share, slots.get("folders", ()))
