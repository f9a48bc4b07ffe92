"""The elements of a whole value that a rank holds: a second reading of specs, so that a mistake in the library's shows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F

from shardlib.debug.finding import Difference, difference
from shardlib.mesh.specs import P
from shardlib.plan.buckets import Bucket
from shardlib.plan.plan import Plan

Coords = Mapping[str, int]


def number(axes: tuple[str, ...], sizes: Mapping[str, int], coords: Coords) -> int:
    """The number of a rank along axes, the first of which is the major one."""
    found = 0
    for axis in axes:
        found = found * sizes[axis] + coords[axis]
    return found


def slice_of(whole: torch.Tensor, spec: P, sizes: Mapping[str, int], coords: Coords) -> torch.Tensor:
    """A rank's slice of a whole tensor, padded with rows of zeros where the spec says so. Flat axes are not applied."""
    for dim, axes in enumerate(spec.entries):
        ways = math.prod(sizes[axis] for axis in axes)
        step = -(-whole.shape[dim] // ways)
        first = min(number(axes, sizes, coords) * step, whole.shape[dim])
        held = whole.narrow(dim, first, min(step, whole.shape[dim] - first))
        if held.shape[dim] < step:
            held = torch.cat([held, held.new_zeros((step - held.shape[dim], *held.shape[1:]))])
        whole = held
    return whole


def shards(
    plan: Plan, bucket: Bucket, wholes: Mapping[str, torch.Tensor], coords: Coords, level: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Path and flat shard of each leaf of a bucket at a level, padding included, from whole leaves."""
    ways = math.prod(bucket.sizes)
    owners = math.prod(bucket.sizes[level:])
    first = number(bucket.axes[:level], dict(zip(bucket.axes, bucket.sizes)), coords) * owners
    for path in bucket.paths:
        part = slice_of(wholes[path], plan.placement_of[path].compute.spec, plan.sizes, coords).reshape(-1)
        chunk = -(-part.numel() // ways)
        rows = F.pad(part, (0, chunk * ways - part.numel())).view(ways, chunk)
        yield path, rows[first : first + owners].reshape(-1)


def segments(bucket: Bucket, buffer: torch.Tensor, level: int) -> Iterator[torch.Tensor]:
    """The leaves' parts of a rank's leaf-major buffer at a level."""
    owners, start = math.prod(bucket.sizes[level:]), 0
    for numel in map(math.prod, bucket.shapes):
        size = -(-numel // math.prod(bucket.sizes)) * owners
        yield buffer[start : start + size]
        start += size


def inner_axes(plan: Plan) -> tuple[str, ...]:
    """The axes along which ranks work on one micro-batch together, but for the stages'."""
    outer = {*plan.batch_axes, *plan.stages.axes}
    return tuple(axis for axis, size in plan.sizes.items() if size > 1 and axis not in outer)


def best_part(plan: Plan, found: torch.Tensor, whole: torch.Tensor, coords: Coords) -> Difference | None:
    """The difference of a rank's activation from its part of the whole one; None where no part has its shape.

    Of several parts of that shape (a dimension may be cut along two axes of one size) the nearest counts.
    """
    if found.dim() != whole.dim():
        return None
    differences = (difference(found, part) for part in _parts(plan, found, whole, coords))
    return min(differences, key=lambda each: each.error, default=None)


def _parts(plan: Plan, found: torch.Tensor, whole: torch.Tensor, coords: Coords) -> Iterator[torch.Tensor]:
    axes = inner_axes(plan)
    for dims in itertools.product((None, *range(whole.dim())), repeat=len(axes)):
        part: torch.Tensor | None = whole
        for axis, dim in zip(axes, dims, strict=True):
            part = part if part is None or dim is None else _cut(plan, part, axis, dim, coords)
        if part is not None and part.shape == found.shape:
            yield part


def _cut(plan: Plan, whole: torch.Tensor, axis: str, dim: int, coords: Coords) -> torch.Tensor | None:
    size, length = plan.sizes[axis], whole.shape[dim]
    if length % size or not length:
        return None
    kind = plan.step.sequence
    if kind is None or kind.axis != axis or length % (2 * size):
        return whole.narrow(dim, coords[axis] * (length // size), length // size)
    return torch.cat([whole.narrow(dim, *chunk) for chunk in kind.chunks(coords[axis], size, length)], dim)
