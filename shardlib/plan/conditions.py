"""Conditions that several transforms put on the other transforms in their chain."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Protocol

import torch

from shardlib.errors import IllegalComposition, axes_named, listing
from shardlib.mesh.mesh import Mesh
from shardlib.plan.claims import ROLES, AxisUse, LeafInfo
from shardlib.plan.transform import Resolved, Transform


class Narrow(Protocol):
    """A codec of gradients, of gathered parameters or of rows of tokens."""

    @property
    def wide(self) -> bool: ...


def require_summed(resolved: Resolved, axis: str, codec: object) -> None:
    """Refuse compressed gradients on an axis over which no gradients are summed."""
    if not resolved.varies_over(axis):
        raise IllegalComposition(
            f"gradients are to travel over axis {axis!r} in {codec}, and nothing sums them there: add "
            f"zero(axis={axis!r}), or name the axis over which zero divides the batch"
        )


def require_split_parameters(resolved: Resolved, axis: str, packing: object) -> None:
    """Refuse compressed gathers on an axis over which no parameters are split."""
    if axis not in resolved.location("param").axes:
        raise IllegalComposition(
            f"parameters are to travel over axis {axis!r} in {packing}, and none are split over it: add zero(stage=3, "
            f"axis={axis!r})"
        )


def require_whole_leaves(resolved: Resolved, axis: str, codec: object) -> None:
    """Refuse a codec that compresses whole leaves if any role of the state is split."""
    split = sorted({axis for role in ROLES for axis in resolved.location(role).axes})
    if split:
        raise IllegalComposition(
            f"gradients are to travel over axis {axis!r} in {codec}, of whole leaves, and zero splits the state over "
            f"{axes_named(split)}: use zero(stage=0), or sl.onebit() or sl.quantize() for shards"
        )


def require_no_float64(
    resolved: Resolved, codec: Narrow, instead: str, leaves: Iterable[LeafInfo] | None = None
) -> None:
    """Refuse float64 parameters with a codec that cannot represent float64.

    Args:
        instead: what a user can do in place of other parameters.
        leaves: those of which values travel in the codec; by default all.
    """
    leaves = resolved.leaves if leaves is None else leaves
    wide = [leaf.path for leaf in leaves if resolved.dtype(leaf) == torch.float64]
    if wide and not codec.wide:
        raise IllegalComposition(
            f"{codec} holds no float64, which {len(wide)} parameters are ({wide[0]} first); use float32 parameters, or "
            f"{instead}"
        )


def require_split_gradients(resolved: Resolved) -> None:
    """Refuse ``sync="each"`` if gradients are not split."""
    if resolved.step.sync == "each" and not resolved.location("grad").axes:
        raise IllegalComposition(
            "sync='each' reduces gradients into their shards, and at ZeRO stages 0 and 1 they are kept whole; use "
            "sync='last', or stage 2 or 3"
        )


# Checks that every axis of a mesh is used, and for purposes that go together.


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
            f"transforms that exclude each other use one axis:\n{listing(twice)}\nGive each an axis of its own; "
            "sequence(kind='megatron') may share that of tensor_slicing, other sequences and experts that of zero."
        )
    idle = [f"{axis!r} (size {size})" for axis, size in mesh.shape.items() if size > 1 and axis not in resolved.axes]
    if idle:
        raise IllegalComposition(
            f"no transform uses axis {', '.join(idle)} of {mesh}. Add one (zero(..., replicate=axis) divides the batch over "
            "it), or leave it out of the mesh"
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
