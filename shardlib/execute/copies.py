"""Checks that ranks that share a batch compute the same loss, and the same gradients for parameters that are not sliced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from shardlib.collectives import primitives
from shardlib.errors import HandleError, listing
from shardlib.mesh.mesh import Mesh
from shardlib.nn.functional import Mean
from shardlib.plan.plan import Plan
from shardlib.sharded.landing import Landing

# _TOLERANCE: relative difference up to which two ranks' sums over the same numbers count as equal. _ROUNDING: a gradient with
# a norm below this share of the whole gradient's is rounding error, and so is a difference of losses below it.
_TOLERANCE, _ROUNDING = 1e-3, 1e-6
_Losses = Sequence[Mean]


def require_alike(grads: Mapping[str, torch.Tensor], landing: Landing, losses: _Losses, plan: Plan, mesh: Mesh) -> None:
    """Refuse losses that ranks compute from their slices, and whole parameters that layers apply to slices.

    Ranks would otherwise train on different losses, or with partial gradients of whole parameters.

    Args:
        grads: bucket name -> this rank's shard of the gradient, summed over the batch.
        landing: that of ``grads``.
        losses: total and weight of each mean of each micro-batch on this rank.

    Raises:
        HandleError: on every rank; names the losses, or the parameters.
    """
    axes = sorted({style.axis for style in plan.styles.values()})
    if not axes:
        return
    _require_one_loss(losses, [axis for axis in axes if axis not in plan.loss_axes], mesh)
    bad: list[str] = []
    found = landing.examined(lambda: [_sums(grads, plan, axis) for axis in axes])
    for axis, sums in zip(axes, found, strict=True):
        of_ranks = primitives.all_gather_object(mesh, [axis], sums)
        smallest = _ROUNDING**2 * max(squares for of_rank in of_ranks for squares, _, _ in of_rank.values())
        for path in sums:
            if path and any(_differ(of_rank[path], of_ranks[0][path], smallest) for of_rank in of_ranks[1:]):
                bad.append(f"{path}: along axis {axis!r}")
    if failures := _of_any_rank(mesh, bad):
        raise HandleError(
            f"parameters that are whole on every rank got other gradients on each:\n{listing(failures)}\n"
            "So they, or what comes after them, are used on the slices that tensor_slicing's rules make of activations. Give "
            "a parameter between a column and a row layer the style 'shared' (its gradient is then summed). If a layer stays "
            "whole beside sliced ones (a key beside queries), slice all of them, or none."
        )


def _require_one_loss(losses: _Losses, axes: Sequence[str], mesh: Mesh) -> None:
    numbers = [float(number) for loss in losses for number in loss]
    bad: list[str] = []
    for axis in axes:
        of_ranks = primitives.all_gather_object(mesh, [axis], numbers)
        columns = list(zip(*of_ranks, strict=False))
        if any(_far(first, other) for first, *others in columns for other in others):
            bad.append(f"along axis {axis!r}: {', '.join(f'{total:g}' for total in columns[0])} (first micro-batch)")
    if failures := _of_any_rank(mesh, bad):
        raise HandleError(
            f"ranks of one batch found other losses:\n{listing(failures)}\nSo the loss is made of the "
            "slices that tensor_slicing's rules make of activations or parameters. Give a column layer whose outputs no row "
            "layer takes up the style sl.column(gather=True), or leave whole what the loss reads ('replicated')."
        )


def _of_any_rank(mesh: Mesh, failures: list[str]) -> list[str]:
    """The failures of all ranks, without repetitions. Collective: all ranks call it."""
    everyone = primitives.all_gather_object(mesh, list(mesh.shape), failures)
    return list(dict.fromkeys(failure for of_rank in everyone for failure in of_rank))


def _far(a: float, b: float) -> bool:
    return abs(a - b) > max(_TOLERANCE * max(abs(a), abs(b)), _ROUNDING)


def _sums(grads: Mapping[str, torch.Tensor], plan: Plan, axis: str) -> dict[str, tuple[float, float, int]]:
    """Path -> sum of squares, sum and number of the gradient's elements, for leaves that ranks along the axis hold copies of.

    The entry for "" has the sum of squares of this rank's gradients of all leaves.
    """
    whole = sum(float(grad.double().square().sum()) for grad in grads.values())
    sums = {"": (whole, 0.0, 1)}
    for bucket in plan.trained:
        if axis in (*bucket.slices, *bucket.axes, *bucket.replicas):
            continue
        for path, grad in zip(bucket.paths, bucket.leaf_segments(grads[bucket.name], bucket.levels), strict=True):
            wide = grad.double()
            sums[path] = float(wide.square().sum()), float(wide.sum()), grad.numel()
    return sums


def _differ(a: tuple[float, float, int], b: tuple[float, float, int], smallest: float) -> bool:
    """Whether the sums of two ranks differ by more than rounding; False for sums that are not finite."""
    squares = max(a[0], b[0])
    return squares > smallest and (
        abs(a[0] - b[0]) > _TOLERANCE * squares or abs(a[1] - b[1]) > _TOLERANCE * (a[2] * squares) ** 0.5
    )
