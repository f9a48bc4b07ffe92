"""What the axes of a mesh are used for, and which uses go together on one axis."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations

from shardlib.claims import Slots
from shardlib.errors import IllegalComposition, listing
from shardlib.mesh import Mesh

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
    unknown = sorted(set(uses) - set(mesh.shape))
    if unknown:
        names = sorted({name for axis in unknown for name in uses[axis].values()})
        raise IllegalComposition(
            f"{' and '.join(names)} uses axis {', '.join(map(repr, unknown))}, which {mesh} does not have; name one of its "
            f"axes with axis=, or make the mesh with {', '.join(f'{axis}=...' for axis in unknown)}"
        )
    sequence = slots.get(("schedule", "sequence"))
    together = {"sequence", "slices" if sequence and sequence.kind == "megatron" else "batch"}
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
