"""What a transform can say, and nothing else: four kinds of claim, each on slots that one transform may hold.

`Use`: how a leaf is used in the loss. `Reduce`: how an axis is reduced. `Live`: where a leaf of the state lives.
`Schedule`: how the step is scheduled. Claims carry no order, so `chain` commutes: two transforms that claim one
slot are refused, and everything else is a union.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch

from shardlib.collectives.codecs.base import Codec
from shardlib.collectives.codecs.integers import Packing
from shardlib.collectives.sequence.base import SequenceKind
from shardlib.collectives.styles.base import Style
from shardlib.errors import IllegalComposition, listing
from shardlib.mesh.specs import P
from shardlib.plan.loss_scale import LossScale
from shardlib.schedules import Pipeline
from shardlib.tree import matches


@dataclass(frozen=True)
class LeafInfo:
    """What a transform sees of a parameter: its path, global shape and dtype; ``aliases`` are a tied leaf's other paths."""

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    aliases: tuple[str, ...] = ()

    def matches(self, globs: str | Sequence[str]) -> bool:
        """Whether any of its paths matches one of the globs."""
        return any(matches(path, globs) for path in (self.path, *self.aliases))


@dataclass(frozen=True)
class Use:
    """How one leaf is used in the loss: its compute spec, how slices work together, its dtype, whether it is trained.

    ``stages``: the pipeline stages that use it.
    """

    path: str
    spec: P | None = None
    dtype: torch.dtype | None = None
    trainable: bool | None = None
    style: Style | None = None
    master: torch.dtype | None = None
    stages: tuple[int, ...] | None = None

    def slots(self) -> dict[tuple[str, ...], Any]:
        return {("use", self.path, name): value for name, value in _given(self) if name != "path"}


@dataclass(frozen=True)
class Reduce:
    """How gradients are summed: over which axis the batch varies, by which method, in which dtype.

    ``axis="*"`` speaks of every axis. ``codec``: how gradients travel over the axis, where not as they are; ``gathered``:
    how the parameters do that are split over it.
    """

    axis: str
    method: str | None = None
    dtype: torch.dtype | None = None
    codec: Codec | None = None
    gathered: Packing | None = None

    def slots(self) -> dict[tuple[str, ...], Any]:
        return {("reduce", self.axis, name): value for name, value in _given(self) if name != "axis"}


@dataclass(frozen=True)
class Live:
    """Where a tensor of the state lives: ``role`` ("param", "grad" or "optimizer") is split over ``axis``.

    The role "second" is a further copy of the parameters, kept from forward to backward.
    """

    role: str
    axis: str

    def slots(self) -> dict[tuple[str, ...], Any]:
        return {("live", self.role, self.axis): True}


@dataclass(frozen=True)
class Schedule:
    """How the step is scheduled."""

    microbatches: int | None = None
    sync: str | None = None
    remat: Any = None
    prefetch: bool | None = None
    loss_scale: LossScale | None = None
    cast_batch: torch.dtype | None = None
    pipeline: Pipeline | None = None
    sequence: SequenceKind | None = None

    def slots(self) -> dict[tuple[str, ...], Any]:
        return {("schedule", name): value for name, value in _given(self)}


Claim = Use | Reduce | Live | Schedule
Slots = dict[tuple[str, ...], Any]


class Transform(Protocol):
    """A value with a ``name`` whose ``claims`` are a pure function of the mesh's sizes and the leaves."""

    @property
    def name(self) -> str: ...

    def claims(self, sizes: Mapping[str, int], leaves: Sequence[LeafInfo]) -> Iterable[Claim]: ...


@dataclass(frozen=True)
class Chain:
    """Several transforms as one. Order-free: every permutation gives the same plan."""

    transforms: tuple[Transform, ...]

    @property
    def name(self) -> str:
        return f"chain({', '.join(transform.name for transform in self.transforms)})"

    def claims(self, sizes: Mapping[str, int], leaves: Sequence[LeafInfo]) -> Iterable[Claim]:
        for transform in self.transforms:
            yield from transform.claims(sizes, leaves)


def chain(*transforms: Transform) -> Chain:
    """Compose transforms. Nested chains flatten; the order does not matter."""
    flat: list[Transform] = []
    for transform in transforms:
        flat.extend(transform.transforms if isinstance(transform, Chain) else [transform])
    return Chain(tuple(flat))


def resolve(
    transform: Transform, sizes: Mapping[str, int], leaves: Sequence[LeafInfo]
) -> tuple[Slots, dict[tuple[str, ...], str], tuple[str, ...]]:
    """Merge every claim into slots; also the name of the transform that wrote each, and a log of that.

    Raises:
        IllegalComposition: two transforms claim one slot; lists all of them.
    """
    members = transform.transforms if isinstance(transform, Chain) else (transform,)
    slots: Slots = {}
    owners: dict[tuple[str, ...], str] = {}
    conflicts: dict[tuple[str, str], list[str]] = {}
    written: dict[str, list[tuple[str, ...]]] = {}
    for member in sorted(members, key=lambda member: member.name):
        for claim in member.claims(sizes, leaves):
            for slot, value in claim.slots().items():
                if slot in owners:
                    told = f"{_slot_name(slot)}: {_show(slots[slot])} against {_show(value)}"
                    conflicts.setdefault((owners[slot], member.name), []).append(told)
                    continue
                slots[slot], owners[slot] = value, member.name
                written.setdefault(member.name, []).append(slot)
    if conflicts:
        raise IllegalComposition(
            "\n".join(
                f"{first} and {second} both claim\n{listing(claims, 5)}\nKeep one of the two, or give them different axes."
                for (first, second), claims in conflicts.items()
            )
        )
    return slots, owners, tuple(f"{name}: {_summary(found, slots)}" for name, found in sorted(written.items()))


def _given(claim: Any) -> Iterable[tuple[str, Any]]:
    return [(f.name, getattr(claim, f.name)) for f in fields(claim) if getattr(claim, f.name) is not None]


def _slot_name(slot: tuple[str, ...]) -> str:
    kind, *rest = slot
    if kind == "use":
        return f"the {rest[1]} of {rest[0]}"
    if kind == "reduce":
        return f"the reduction over axis {rest[0]!r} ({rest[1]})"
    if kind == "live":
        return f"the split of the {rest[0]} state over axis {rest[1]!r}"
    return f"the schedule's {rest[0]}"


def _show(value: Any) -> str:
    # A function by its name: ranks compare this text, and an address is a process's own.
    return str(getattr(value, "__qualname__", value)).removeprefix("torch.")


_REDUCTIONS = {
    "method": "reduces over axis {axis!r} by {value}",
    "dtype": "reduces in {value}",
    "codec": "gradients travel over axis {axis!r} in {value}",
    "gathered": "parameters travel over axis {axis!r} in {value}",
}


def _summary(found: list[tuple[str, ...]], slots: Slots) -> str:
    """One line: claims on many leaves are counted, splits gathered by axis, the rest spelled out."""
    uses: dict[str, int] = {}
    splits: dict[str, list[str]] = {}
    lines = []
    for slot in found:
        kind, *rest = slot
        if kind == "use":
            told = f"{rest[1]}={_show(slots[slot])}"
            uses[told] = uses.get(told, 0) + 1
        elif kind == "live" and rest[0] == "second":
            lines.append(f"keeps a second shard of parameters over axis {rest[1]!r}")
        elif kind == "live":
            splits.setdefault(rest[1], []).append(rest[0])
        elif kind == "reduce":
            value = _show(slots[slot])
            lines.append(_REDUCTIONS[rest[1]].format(axis=rest[0], value=value))
        else:
            lines.append(f"{rest[0]}={_show(slots[slot])}")
    lines += [f"splits {', '.join(roles)} over axis {axis!r}" for axis, roles in splits.items()]
    lines += [f"{told} on {count} leaves" for told, count in uses.items()]
    return "; ".join(lines)
