"""Checks that every axis of a mesh is used, and for purposes that go together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations

from shardlib.errors import IllegalComposition, listing
from shardlib.mesh.mesh import Mesh
from shardlib.plan.claims import AxisUse
from shardlib.plan.resolved import Resolved
from shardlib.plan.transform import Transform


def check_axes(resolved: Resolved, mesh: Mesh, members: Sequence[Transform]) -> None:
    """Refuse axes that the mesh does not have, axes with two uses that exclude each other, and axes without a use.

    Raises:
        IllegalComposition: lists all failures of one kind, with the transforms' names.
    """
    _refuse_unknown(resolved, mesh, {member.name: member for member in members})
    twice = [
        f"axis {axis!r}: {uses[one]} {one.does}, and {uses[other]} {other.does}"
        for axis, uses in resolved.axes.items()
        for one, other in combinations(sorted(_by_name(uses), key=lambda use: use.name), 2)
        if other.name != one.beside and one.name != other.beside
    ]
    if twice:
        raise IllegalComposition(
            f"transforms that exclude each other use one axis:\n{listing(twice)}\nGive each an axis of its own. "
            "These may share one: sequence(kind='megatron') that of tensor_slicing, other sequences and experts that of zero."
        )
    idle = [f"{axis!r} (size {size})" for axis, size in mesh.shape.items() if size > 1 and axis not in resolved.axes]
    if idle:
        raise IllegalComposition(
            f"no transform uses axis {', '.join(idle)} of {mesh}: its ranks would all do the same work. Add a transform "
            "for it (zero(..., replicate=axis) divides the batch over it), or leave it out of the mesh"
        )


def _refuse_unknown(resolved: Resolved, mesh: Mesh, transforms: Mapping[str, Transform]) -> None:
    idle = [axis for axis in mesh.shape if axis not in resolved.axes]
    failures = []
    for axis in sorted(set(resolved.axes) - set(mesh.shape)):
        uses = resolved.axes[axis]
        for use in _by_name(uses):
            # A use that joins another transform's axis is offered such an axis; any other use is offered an idle axis.
            shared = [other for other in mesh.shape if any(u.name == use.beside for u in resolved.axes.get(other, ()))]
            candidates = shared if use.joins else idle
            candidate = candidates[0] if candidates else None
            if candidates is idle and idle:
                idle.pop(0)
            remedy = _remedy(transforms[uses[use]], axis, candidate)
            failures.append(f"{uses[use]} uses axis {axis!r}, which {mesh} does not have; {remedy}")
    if failures:
        raise IllegalComposition("\n".join(failures))


def _by_name(uses: Iterable[AxisUse]) -> list[AxisUse]:
    """One use per name: if several uses have the same name, one that needs an axis of its own is taken."""
    by_name: dict[str, AxisUse] = {}
    for use in uses:
        if use.name not in by_name or not use.joins:
            by_name[use.name] = use
    return list(by_name.values())


def _remedy(transform: Transform, axis: str, candidate: str | None) -> str:
    """The remedy for a transform whose axis the mesh does not have; ``candidate`` is an axis that it could use instead."""
    if candidate is not None:
        return f"use {candidate!r} instead: {transform.over(axis, candidate)}"
    return f"add {axis}=1 to the mesh, or leave {transform.name.partition('(')[0]} out"
