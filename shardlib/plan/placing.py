"""Placement of leaves by resolved claims."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from shardlib.errors import IllegalComposition, axes_named
from shardlib.mesh.specs import WHOLE, Leaf, P
from shardlib.plan.buckets import Bucket, BucketMemory
from shardlib.plan.claims import SECOND, LeafInfo
from shardlib.plan.placement import Placement
from shardlib.plan.resolved import Resolved
from shardlib.plan.value import ROLES


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
                f"the {role} state is not split over {axes_named(missing)}, and the one before it (param, "
                "grad, optimizer) is; a higher ZeRO stage splits everything a lower one does"
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
