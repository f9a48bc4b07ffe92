"""Whether ranks that hold copies of a parameter found the same gradient for it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from shardlib.collectives import primitives
from shardlib.errors import HandleError, listing
from shardlib.mesh import Mesh
from shardlib.plan import Plan

# By how much sums over the same numbers may differ; and the share of the whole gradient below which one is rounding.
_ALIKE, _ROUNDING = 1e-3, 1e-6


def require_alike(grads: Mapping[str, torch.Tensor], plan: Plan, mesh: Mesh) -> None:
    """Refuse whole parameters that layers use on slices: each rank would train them by its own part of their gradient.

    Args:
        grads: bucket name -> this rank's shard, summed over the batch.

    Raises:
        HandleError: on every rank; names the parameters.
    """
    axes = sorted({style.axis for style in plan.styles.values()})
    if not axes:
        return
    bad: list[str] = []
    for axis in axes:
        mine = _sums(grads, plan, axis)
        everyone = primitives.all_gather_object(mesh, [axis], mine)
        smallest = _ROUNDING**2 * max(squares for theirs in everyone for squares, _, _ in theirs.values())
        for path in mine:
            if path and any(_differ(theirs[path], everyone[0][path], smallest) for theirs in everyone[1:]):
                bad.append(f"{path}: along axis {axis!r}")
    found = [path for paths in primitives.all_gather_object(mesh, list(mesh.shape), bad) for path in paths]
    if found:
        raise HandleError(
            f"parameters that are whole on every rank got other gradients on each:\n{listing(list(dict.fromkeys(found)))}\n"
            "So they, or what comes after them, are used on the slices that tensor_slicing's rules make of activations. Give "
            "one that is used between a column and a row layer the style 'shared' (its gradient is then summed); and where a "
            "layer stays whole beside sliced ones (a key beside queries), slice all of them, or none."
        )


def _sums(grads: Mapping[str, torch.Tensor], plan: Plan, axis: str) -> dict[str, tuple[float, float, int]]:
    """Path -> squares, sum and number of a gradient's elements, of those that ranks along the axis hold copies of.

    Under "" those of all.
    """
    whole = sum(float(grad.double().square().sum()) for grad in grads.values())
    found = {"": (whole, 0.0, 1)}
    for bucket in plan.trained:
        if axis in (*bucket.slices, *bucket.axes, *bucket.replicas):
            continue
        for path, part in zip(bucket.paths, bucket.leaf_parts(grads[bucket.name], bucket.levels), strict=True):
            wide = part.double()
            found[path] = float(wide.square().sum()), float(wide.sum()), part.numel()
    return found


def _differ(one: tuple[float, float, int], other: tuple[float, float, int], smallest: float) -> bool:
    """Not where something is not finite, which is told elsewhere."""
    squares = max(one[0], other[0])
    return squares > smallest and (
        abs(one[0] - other[0]) > _ALIKE * squares or abs(one[1] - other[1]) > _ALIKE * (one[2] * squares) ** 0.5
    )
