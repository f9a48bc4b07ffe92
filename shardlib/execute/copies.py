"""Whether ranks that share a batch found the same loss, and the same gradients for parameters that they hold copies of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from shardlib.collectives import primitives
from shardlib.errors import HandleError, listing
from shardlib.mesh.mesh import Mesh
from shardlib.plan.plan import Plan

# By how much sums over the same numbers may differ; and the share of the whole gradient below which one is rounding, which
# is also the difference of two losses that is.
_ALIKE, _ROUNDING = 1e-3, 1e-6
_Losses = Sequence[tuple[torch.Tensor, torch.Tensor]]


def require_alike(grads: Mapping[str, torch.Tensor], losses: _Losses, plan: Plan, mesh: Mesh) -> None:
    """Refuse a loss of slices, and whole parameters that layers use on slices.

    Each rank would train by a loss of its own, or parameters by its own part of their gradient.

    Args:
        grads: bucket name -> this rank's shard, summed over the batch.
        losses: total and weight of each micro-batch on this rank.

    Raises:
        HandleError: on every rank; names the losses, or the parameters.
    """
    axes = sorted({style.axis for style in plan.styles.values()})
    if not axes:
        return
    _require_one_loss(losses, [axis for axis in axes if axis not in plan.loss_axes], mesh)
    bad: list[str] = []
    for axis in axes:
        mine = _sums(grads, plan, axis)
        everyone = primitives.all_gather_object(mesh, [axis], mine)
        smallest = _ROUNDING**2 * max(squares for theirs in everyone for squares, _, _ in theirs.values())
        for path in mine:
            if path and any(_differ(theirs[path], everyone[0][path], smallest) for theirs in everyone[1:]):
                bad.append(f"{path}: along axis {axis!r}")
    if found := _by_any(mesh, bad):
        raise HandleError(
            f"parameters that are whole on every rank got other gradients on each:\n{listing(found)}\n"
            "So they, or what comes after them, are used on the slices that tensor_slicing's rules make of activations. Give "
            "one that is used between a column and a row layer the style 'shared' (its gradient is then summed); and where a "
            "layer stays whole beside sliced ones (a key beside queries), slice all of them, or none."
        )


def _require_one_loss(losses: _Losses, axes: Sequence[str], mesh: Mesh) -> None:
    mine = [float(number) for loss in losses for number in loss]
    bad: list[str] = []
    for axis in axes:
        everyone = primitives.all_gather_object(mesh, [axis], mine)
        columns = list(zip(*everyone, strict=False))
        if any(_apart(one, other) for one, *others in columns for other in others):
            bad.append(f"along axis {axis!r}: {', '.join(f'{total:g}' for total in columns[0])} (first micro-batch)")
    if found := _by_any(mesh, bad):
        raise HandleError(
            f"ranks of one batch found other losses:\n{listing(found)}\nSo the loss is made of the "
            "slices that tensor_slicing's rules make of activations or parameters. Give a column layer whose outputs no row "
            "layer takes up the style sl.column(gather=True), or leave what the loss reads whole ('replicated')."
        )


def _by_any(mesh: Mesh, found: list[str]) -> list[str]:
    """What any rank found, once each. All ranks call it."""
    everyone = primitives.all_gather_object(mesh, list(mesh.shape), found)
    return list(dict.fromkeys(one for theirs in everyone for one in theirs))


def _apart(one: float, other: float) -> bool:
    return abs(one - other) > max(_ALIKE * max(abs(one), abs(other)), _ROUNDING)


def _sums(grads: Mapping[str, torch.Tensor], plan: Plan, axis: str) -> dict[str, tuple[float, float, int]]:
    """Path -> squares, sum and number of a gradient's elements, of those that ranks along the axis hold copies of.

    Under "" those of all.
    """
    whole = sum(float(grad.double().square().sum()) for grad in grads.values())
    found = {"": (whole, 0.0, 1)}
    for bucket in plan.trained:
        if axis in (*bucket.slices, *bucket.axes, *bucket.replicas):
            continue
        for path, part in zip(bucket.paths, bucket.leaf_segments(grads[bucket.name], bucket.levels), strict=True):
            wide = part.double()
            found[path] = float(wide.square().sum()), float(wide.sum()), part.numel()
    return found


def _differ(one: tuple[float, float, int], other: tuple[float, float, int], smallest: float) -> bool:
    """Not where something is not finite, which is told elsewhere."""
    squares = max(one[0], other[0])
    return squares > smallest and (
        abs(one[0] - other[0]) > _ALIKE * squares or abs(one[1] - other[1]) > _ALIKE * (one[2] * squares) ** 0.5
    )
