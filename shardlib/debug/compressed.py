"""Sums of gradients in few bits: nothing may be lost but what is kept for the next step."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F

from shardlib.debug.difference import FLOOR, Difference, difference, tolerance
from shardlib.debug.finding import Finding
from shardlib.debug.local import local_gradient, rounded
from shardlib.debug.replay import Buffers
from shardlib.debug.view import StepView
from shardlib.plan.buckets import Bucket
from shardlib.plan.channels import Channel

_NOISE = 10  # times the part of a sum that is no multiple of the right one, up to which its factor may be another


def compressed(view: StepView, bucket: Bucket, got: Mapping[int, Buffers]) -> Finding | None:
    """A compressed sum that loses something: what goes in is what comes out and what is kept for the next step.

    Sums over several axes are checked as far as each is exact.
    """
    channels = [channel for channel in view.plan.channels if channel.bucket.name == bucket.name]
    shared = view.in_parts(bucket) or len(bucket.homes) > 1
    if len(channels) != 1 or len(view.plan.routes[bucket.name].reductions) != 1 or shared:
        return None
    (channel,) = channels
    for group in _groups(view, channel.axis):
        if not all(rank in got for rank in group) or (balance := _balance(view, channel, group)) is None:
            continue
        entered, left = balance
        lost = entered - left
        if any(kept.residual for kept in channel.keeps.values()):
            apart = rounded(
                difference(lost, torch.zeros_like(lost))._replace(largest=float(entered.abs().max())), bucket
            )
            note = "what is sent and what is kept for the next step do not add up to the gradients"
        else:
            apart, note = _without_residual(entered, left, bucket)
        if apart.matters:
            what = f"the sum of the gradient of unit {bucket.label} over axis {channel.axis!r} in {channel.codec}"
            leaf = _leaf_at(channel, int(lost.abs().argmax()))
            return view.finding("reduction", what, (tuple(group), apart), leaf=leaf, note=note)
    return None


def _without_residual(wanted: torch.Tensor, found: torch.Tensor, bucket: Bucket) -> tuple[Difference, str]:
    """The error of a sum that may lose what it cannot hold: it has no other factor than its noise explains."""
    norm = max(float(wanted.norm()), FLOOR)
    factor = float((found * wanted).sum()) / norm**2
    noise = float((found - factor * wanted).norm())
    limit = max(_NOISE * noise, tolerance(bucket.reduce_dtype) * norm)
    return Difference(abs(factor - 1) * norm, limit, norm), f"it is {factor:.3g} times the sum of what the ranks send"


def _groups(view: StepView, axis: str) -> list[list[int]]:
    """The ranks that exchange with each other over an axis, in their order along it."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in view.replay.steps:
        others = tuple(place for name, place in view.coords(rank).items() if name != axis)
        groups.setdefault(others, []).append(rank)
    return list(groups.values())


def _balance(view: StepView, channel: Channel, group: list[int]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """What enters a sum, gradients and residuals; and what leaves it, the sum and residuals. Of the padded buffer."""
    entered, scattered = None, channel.level is not None
    for rank in group:
        mine = _whole(view, channel.bucket, rank)
        if mine is None:
            return None
        entered = mine if entered is None else entered + mine
    assert entered is not None
    sums = [view.ranks[rank].grads[channel.bucket.name].double() for rank in group]
    left = torch.cat(sums) if scattered else sums[0]
    residuals = {name: kept for name, kept in channel.keeps.items() if kept.residual}
    size = next((kept.elements for kept in residuals.values() if not kept.by_row), entered.numel())
    entered, left = (_padded(buffer, channel.ways, size, scattered) for buffer in (entered, left))
    for name, kept in residuals.items():
        before, after = ([view.ranks[rank].comm[when][name].double() for rank in group] for when in (0, 1))
        join = torch.cat if kept.by_row else _added
        entered, left = entered + join(before), left + join(after)
    return entered, left


def _added(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(tensors).sum(0)


def _whole(view: StepView, bucket: Bucket, rank: int) -> torch.Tensor | None:
    """A rank's own gradient of a bucket on one device, rank-major."""
    columns, ways = [], math.prod(bucket.sizes)
    for path in bucket.paths:
        own = local_gradient(view, rank, path, view.cells_of(rank))
        if own is None:
            return None
        chunk = -(-own.numel() // ways)
        columns.append(F.pad(own.reshape(-1), (0, chunk * ways - own.numel())).view(ways, chunk))
    return torch.cat(columns, 1).reshape(-1)


def _padded(buffer: torch.Tensor, ways: int, size: int, scattered: bool) -> torch.Tensor:
    """A buffer as the codec pads it: every row of it, if rows are scattered, or else its end."""
    rows = buffer.view(ways, -1) if scattered else buffer.view(1, -1)
    return F.pad(rows, (0, size // len(rows) - rows.shape[1])).reshape(-1)


def _leaf_at(channel: Channel, position: int) -> str:
    """The leaf that an element of the exchanged buffer belongs to."""
    bucket = channel.bucket
    within = position % max(channel.elements // (channel.ways if channel.level is not None else 1), 1)
    chunks = [-(-math.prod(shape) // math.prod(bucket.sizes)) for shape in bucket.shapes]
    for path, chunk in zip(bucket.paths, chunks):
        if within < chunk:
            return path
        within -= chunk
    return bucket.paths[-1]
