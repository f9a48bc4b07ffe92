"""From what transforms said of each leaf to where it lives in each role."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from shardlib.errors import IllegalComposition, axes_named
from shardlib.mesh.specs import Leaf, P
from shardlib.plan.claims import SECOND, LeafInfo
from shardlib.plan.placement import Placement
from shardlib.plan.resolved import Resolved
from shardlib.plan.value import ROLES


@dataclass(frozen=True)
class Splits:
    """Over which axes each role is split, ordered so that each role's are the first few of the next one's."""

    param: tuple[str, ...]
    grad: tuple[str, ...]
    optimizer: tuple[str, ...]

    def of(self, role: str) -> tuple[str, ...]:
        return getattr(self, role)


def splits_of(resolved: Resolved) -> Splits:
    """The axes of size one are left out.

    Raises:
        IllegalComposition: a role that is not split as the one before it is.
    """
    found: dict[str, tuple[str, ...]] = {}
    before: tuple[str, ...] = ()
    second = resolved.home(SECOND).axes
    for role in ROLES:
        mine = resolved.home(role).axes
        missing = sorted(set(before) - mine)
        if missing:
            raise IllegalComposition(
                f"the {role} state is not split over {axes_named(missing)}, and the one before it (param, "
                "grad, optimizer) is; a higher ZeRO stage splits everything a lower one does"
            )
        # What the second shard is split over comes first: it is the stage before the last of a gather.
        new = [axis for axis in resolved.sizes if axis in mine and axis not in before]
        before = (*before, *sorted(new, key=lambda axis: axis not in second))
        found[role] = before
    return Splits(**{role: tuple(axis for axis in axes if resolved.sizes[axis] > 1) for role, axes in found.items()})


def second_level(resolved: Resolved, splits: Splits) -> int | None:
    """The level at which gathered parameters are kept from forward to backward, or None."""
    kept = [axis for axis in splits.param if axis in resolved.home(SECOND).axes]
    return len(kept) if 0 < len(kept) < len(splits.param) else None


def placed(info: LeafInfo, unit: str, resolved: Resolved, splits: Splits) -> Placement:
    """Where one leaf lives; its bucket is still to be found."""
    use, dtype = resolved.use(info.path), resolved.dtype(info)
    compute = Leaf(info.path, info.shape, dtype, use.spec or P())
    trainable = dtype.is_floating_point and use.trainable is not False

    def stored(role: str, dtype: torch.dtype) -> Leaf:
        axes = [axis for axis in splits.of(role) if axis not in compute.spec.axes]
        spec = compute.spec.split(axes, info.shape, resolved.sizes)
        return replace(compute, dtype=dtype, spec=spec, memory=resolved.home(role).memory)

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
    )


def reduce_dtype(dtype: torch.dtype, resolved: Resolved) -> torch.dtype:
    """The dtype that gradients are summed in: as asked; else 16-bit ones in fp32 and wider ones as they are."""
    if dtype.itemsize >= 4:
        return dtype
    everywhere = resolved.reductions.get("*")
    return (everywhere and everywhere.dtype) or torch.float32


def padded_slices(resolved: Resolved) -> list[str]:
    """A line for the log where slices are padded with rows of zeros."""
    found = []
    for info in resolved.leaves:
        spec = resolved.use(info.path).spec
        if spec is not None and spec.padded:
            ways = math.prod(resolved.sizes[axis] for axis in spec.entries[0])
            rows = spec.local_shape(info.shape, resolved.sizes)[0]
            found.append(f"{info.path} ({info.shape[0]} as {ways} × {rows})")
    return [f"padded with rows of zeros: {', '.join(found)}"] if found else []
