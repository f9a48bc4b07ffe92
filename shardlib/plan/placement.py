"""Placements: how each parameter is placed on the mesh as a parameter, as a gradient and in the optimizer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from shardlib.collectives.styles.base import Style
from shardlib.common._compat import post_accumulate_hooks, read_backward_hooks
from shardlib.errors import IllegalComposition, TreeError, axes_named, listing
from shardlib.mesh.specs import WHOLE, Leaf, P
from shardlib.plan.buckets import Bucket, BucketMemory
from shardlib.plan.claims import ROLES, SECOND, LeafInfo
from shardlib.plan.transform import Resolved
from shardlib.tree import untrained


@dataclass(frozen=True)
class Placement:
    """How one parameter is placed in each role.

    Attributes:
        path: the parameter's path; the first one of a tied leaf.
        aliases: the other paths of a tied leaf.
        unit: name of the parameter's unit.
        bucket: name of the parameter's bucket.
        compute: shape, dtype and spec in the loss.
        param: the stored parameter.
        grad: the accumulated gradient; None for a frozen leaf.
        optimizer: the layout of the optimizer's state; None for a frozen leaf.
        style: how ranks that hold slices compute a layer together; None for an unsliced leaf.
        dealt: axes over which experts are dealt out: ranks hold different ones, and all of their tokens reach each.
        scaled: whether matrix products by the parameter are in 8 bits.
    """

    path: str
    aliases: tuple[str, ...]
    unit: str
    bucket: str
    compute: Leaf
    param: Leaf
    grad: Leaf | None
    optimizer: Leaf | None
    style: Style | None = None
    dealt: tuple[str, ...] = ()
    scaled: bool = False


def check_dtypes(placements: Sequence[Placement], resolved: Resolved) -> None:
    """Refuse leaves of dtypes that optimizers do not train (complex and 8-bit floats), unless they are frozen."""
    failures = [
        f"{placement.path}: {placement.compute.dtype}; {instead}"
        for placement in placements
        if resolved.use(placement.path).trainable is not False and (instead := untrained(placement.compute.dtype))
    ]
    if failures:
        raise TreeError(
            f"{len(failures)} leaves of dtypes that are not trained:\n{listing(failures)}\nOr leave them as they are, by "
            "sl.freeze(path)."
        )


def check_parameters(leaves: Mapping[str, torch.Tensor], resolved: Resolved) -> None:
    """Refuse leaves that are `torch.nn.Parameter` objects with ``requires_grad=False``, or tensors with hooks on their
    gradients, unless they are frozen here too."""
    trained = {path: leaf for path, leaf in leaves.items() if resolved.use(path).trainable is not False}
    still = [
        path
        for path, leaf in trained.items()
        if isinstance(leaf, torch.nn.Parameter) and leaf.is_floating_point() and not leaf.requires_grad
    ]
    if still:
        raise TreeError(
            f"{len(still)} leaves are parameters with requires_grad=False, and would be trained:\n{listing(still)}\n"
            "Add sl.freeze(paths) to the plan, or give leaf.detach(), or call leaf.requires_grad_(True)"
        )
    hooked = [path for path, leaf in trained.items() if read_backward_hooks(leaf) or post_accumulate_hooks(leaf)]
    if hooked:
        raise TreeError(
            f"{len(hooked)} leaves have hooks on their gradients, which would not run:\n{listing(hooked)}\n"
            "Mask in the loss, or by sl.optim.chain(...); those of a module run if sl.from_module is given the module"
        )


# Placement by resolved claims.


@dataclass(frozen=True)
class RoleAxes:
    """The axes over which each role is split. A role's axes are the first axes of the next role."""

    param: tuple[str, ...]
    grad: tuple[str, ...]
    optimizer: tuple[str, ...]

    def of(self, role: str) -> tuple[str, ...]:
        return getattr(self, role)


def splits_of(resolved: Resolved) -> RoleAxes:
    """The axes over which transforms split each role, axes of size one left out.

    Raises:
        IllegalComposition: a role is not split over an axis of the role before it (param, grad, optimizer).
    """
    splits: dict[str, tuple[str, ...]] = {}
    before: tuple[str, ...] = ()
    second = resolved.location(SECOND).axes
    for role in ROLES:
        claimed = resolved.location(role).axes
        missing = sorted(set(before) - claimed)
        if missing:
            raise IllegalComposition(
                f"the {role} state is not split over {axes_named(missing)}, and the one before it (param, grad, optimizer) "
                "is; split it too"
            )
        # The second shard's axes come first (major), so that a gather passes through the second shard on its way.
        new = [axis for axis in resolved.sizes if axis in claimed and axis not in before]
        before = (*before, *sorted(new, key=lambda axis: axis not in second))
        splits[role] = before
    return RoleAxes(**{role: tuple(axis for axis in axes if resolved.sizes[axis] > 1) for role, axes in splits.items()})


def second_level(resolved: Resolved, splits: RoleAxes) -> int | None:
    """The level of the second shard, which is kept from forward to backward; None without one."""
    kept = [axis for axis in splits.param if axis in resolved.location(SECOND).axes]
    return len(kept) if 0 < len(kept) < len(splits.param) else None


def placed(info: LeafInfo, unit: str, resolved: Resolved, splits: RoleAxes) -> Placement:
    """The placement of one leaf, with no bucket yet."""
    use, dtype = resolved.use(info.path), resolved.dtype(info)
    compute = Leaf(info.path, info.shape, dtype, use.spec or WHOLE)
    trainable = dtype.is_floating_point and use.trainable is not False
    # Without an exchange of tokens in the plan, a loss brings tokens to its experts by collectives of its own.
    dealt = (use.varying or ()) if resolved.step.tokens else ()
    sizes = tuple(resolved.sizes.items())

    def stored(role: str, dtype: torch.dtype) -> Leaf:
        return Leaf(info.path, info.shape, dtype, _split(compute.spec, splits.of(role), info.shape, sizes))

    return Placement(
        path=info.path,
        aliases=info.aliases,
        unit=unit,
        bucket="",
        compute=compute,
        param=stored("param", dtype),
        grad=stored("grad", reduce_dtype(dtype, resolved)) if trainable else None,
        optimizer=stored("optimizer", use.master or dtype) if trainable else None,
        style=use.style,
        dealt=tuple(axis for axis in dealt if resolved.sizes.get(axis, 1) > 1),
        scaled=bool(use.scaled),
    )


@lru_cache(1024)  # blocks that are alike have leaves that are split alike
def _split(spec: P, split: tuple[str, ...], shape: tuple[int, ...], sizes: tuple[tuple[str, int], ...]) -> P:
    """A spec with those axes of a role's that it does not have yet."""
    return spec.split([axis for axis in split if axis not in spec.axes], shape, dict(sizes))


def in_bucket(placement: Placement, bucket: Bucket) -> Placement:
    """The placement of a leaf of ``bucket``, which says where the leaf lives."""
    leaves = {role: getattr(placement, role) for role in BucketMemory._fields}
    moved = {
        role: replace(leaf, memory=memory)
        for (role, leaf), memory in zip(leaves.items(), bucket.memory, strict=True)
        if leaf and leaf.memory != memory
    }
    return replace(placement, bucket=bucket.name, **moved)


def reduce_dtype(dtype: torch.dtype, resolved: Resolved) -> torch.dtype:
    """The dtype in which gradients of a leaf of ``dtype`` are summed: their own, or for 16 bits the claimed one or fp32."""
    if dtype.itemsize >= 4:
        return dtype
    return resolved.everywhere("dtype") or torch.float32


def padded_slices(resolved: Resolved) -> list[str]:
    """A line for the log on slices that are padded with rows of zeros."""
    padded = []
    for info in resolved.leaves:
        spec = resolved.use(info.path).spec
        if spec is not None and spec.padded:
            ways = math.prod(resolved.sizes[axis] for axis in spec.entries[0])
            rows = spec.local_shape(info.shape, resolved.sizes)[0]
            padded.append(f"{info.path} ({info.shape[0]} as {ways} × {rows})")
    return [f"padded with rows of zeros: {', '.join(padded)}"] if padded else []
