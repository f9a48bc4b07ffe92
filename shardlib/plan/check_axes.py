"""What the axes of a mesh are used for, and which uses go together on one axis."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations

from shardlib.errors import IllegalComposition, listing
from shardlib.mesh.mesh import Mesh
from shardlib.plan.claims import Slots

_TOLD = {
    "batch": "shares the batch out",
    "sequence": "cuts sequences",
    "slices": "slices layers",
    "stages": "lays out stages",
}


def check_axes(slots: Slots, owners: Mapping[tuple[str, ...], str], mesh: Mesh) -> None:
    """Refuse axes that the mesh lacks, that are used twice, or that nothing uses.

    Args:
        owners: which transform wrote each slot.

    Raises:
        IllegalComposition: lists all of one kind, naming the transforms.
    """
    uses: dict[str, dict[str, str]] = {}  # axis -> what for -> by which transform
    for axis, use, slot in _uses(slots):
        uses.setdefault(axis, {}).setdefault(use, owners[slot])
    sequence = slots.get(("schedule", "sequence"))
    together = {"sequence", "slices" if sequence and sequence.gathers_for_slices else "batch"}
    unknown = sorted(set(uses) - set(mesh.shape))
    if unknown:
        used = {use: [axis for axis in mesh.shape if use in uses.get(axis, ())] for use in _TOLD}
        idle = [axis for axis in mesh.shape if axis not in uses]
        failures = []
        for axis in unknown:
            for use, name in uses[axis].items():
                # Some belong on an axis that another transform uses; the others each want one of their own.
                if use == "sequence" and "slices" in together:
                    others = used["slices"]
                elif use == "batch" and ("reduce", axis, "method") not in slots:
                    others = used["batch"]
                else:
                    others = []
                other = others[0] if others else idle.pop(0) if idle else None
                failures.append(f"{name} uses axis {axis!r}, which {mesh} does not have; {_instead(name, axis, other)}")
        raise IllegalComposition("\n".join(failures))
    twice = [
        f"axis {axis!r}: {found[one]} {_TOLD[one]}, and {found[other]} {_TOLD[other]}"
        for axis, found in uses.items()
        for one, other in combinations(sorted(found), 2)
        if {one, other} != together
    ]
    if twice:
        raise IllegalComposition(
            f"transforms that exclude each other use one axis:\n{listing(twice)}\nGive each an axis of its own. Only "
            "sequence(...) may share one: with kind='megatron' that of tensor_slicing, with the other kinds that of zero."
        )
    idle = [f"{axis!r} (size {size})" for axis, size in mesh.shape.items() if size > 1 and axis not in uses]
    if idle:
        raise IllegalComposition(
            f"no transform uses axis {', '.join(idle)} of {mesh}: its ranks would all do the same work. Add a transform "
            "for it (zero(..., replicate=axis) shares the batch over it), or leave it out of the mesh"
        )


def _instead(name: str, axis: str, other: str | None) -> str:
    """What helps a transform to an axis: the ``other`` one, or one more."""
    if other is not None:
        return f"use {other!r} in its place: {name.replace(repr(axis), repr(other))}"
    return f"add {axis}=1 to the mesh, or leave {name.partition('(')[0]} out"


def _uses(slots: Slots) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """(axis, what for, slot)."""
    for slot, value in slots.items():
        if slot[0] == "reduce" and slot[1] != "*":
            yield slot[1], "batch", slot
        elif slot[0] == "live":
            yield slot[2], "batch", slot
        elif slot[0] == "use" and slot[2] == "spec":
            for axis in value.axes:
                yield axis, "slices", slot
        elif slot == ("schedule", "pipeline"):
            yield value.axis, "stages", slot
        elif slot == ("schedule", "sequence"):
            yield value.axis, "sequence", slot
