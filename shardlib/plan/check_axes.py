"""What the axes of a mesh are used for, and which uses go together on one axis."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations

from shardlib.errors import IllegalComposition, listing
from shardlib.mesh.mesh import Mesh
from shardlib.plan.claims import AxisUse
from shardlib.plan.resolved import Resolved


def check_axes(resolved: Resolved, mesh: Mesh) -> None:
    """Refuse axes that the mesh lacks, that are used twice, or that nothing uses.

    Raises:
        IllegalComposition: lists all of one kind, naming the transforms.
    """
    _refuse_unknown(resolved, mesh)
    twice = [
        f"axis {axis!r}: {uses[one]} {one.does}, and {uses[other]} {other.does}"
        for axis, uses in resolved.axes.items()
        for one, other in combinations(sorted(_by_name(uses), key=lambda use: use.name), 2)
        if other.name != one.beside and one.name != other.beside
    ]
    if twice:
        raise IllegalComposition(
            f"transforms that exclude each other use one axis:\n{listing(twice)}\nGive each an axis of its own. Only "
            "sequence(...) may share one: with kind='megatron' that of tensor_slicing, with the other kinds that of zero."
        )
    idle = [f"{axis!r} (size {size})" for axis, size in mesh.shape.items() if size > 1 and axis not in resolved.axes]
    if idle:
        raise IllegalComposition(
            f"no transform uses axis {', '.join(idle)} of {mesh}: its ranks would all do the same work. Add a transform "
            "for it (zero(..., replicate=axis) shares the batch over it), or leave it out of the mesh"
        )


def _refuse_unknown(resolved: Resolved, mesh: Mesh) -> None:
    idle = [axis for axis in mesh.shape if axis not in resolved.axes]
    failures = []
    for axis in sorted(set(resolved.axes) - set(mesh.shape)):
        uses = resolved.axes[axis]
        for use in _by_name(uses):
            # Some belong on an axis that another transform uses; the others each want one of their own.
            joined = [other for other in mesh.shape if any(u.name == use.beside for u in resolved.axes.get(other, ()))]
            found = joined if use.joins else idle
            other = found[0] if found else None
            if found is idle and idle:
                idle.pop(0)
            failures.append(
                f"{uses[use]} uses axis {axis!r}, which {mesh} does not have; {_instead(uses[use], axis, other)}"
            )
    if failures:
        raise IllegalComposition("\n".join(failures))


def _by_name(uses: Iterable[AxisUse]) -> list[AxisUse]:
    """One use of each name; of several, one that wants an axis of its own."""
    found: dict[str, AxisUse] = {}
    for use in uses:
        if use.name not in found or not use.joins:
            found[use.name] = use
    return list(found.values())


def _instead(name: str, axis: str, other: str | None) -> str:
    """What helps a transform to an axis: the ``other`` one, or one more."""
    if other is not None:
        return f"use {other!r} in its place: {name.replace(repr(axis), repr(other))}"
    return f"add {axis}=1 to the mesh, or leave {name.partition('(')[0]} out"
