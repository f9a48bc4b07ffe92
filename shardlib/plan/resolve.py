"""Merging the claims of all transforms, in any order, into one record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from shardlib.errors import IllegalComposition, listing
from shardlib.mesh.memories import MEMORIES
from shardlib.plan.claims import Claim, LeafInfo, Live, Reduce, Step, Use
from shardlib.plan.resolved import Location, Resolved, Slot, show
from shardlib.plan.transform import Chain, Transform


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
