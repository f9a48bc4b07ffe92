"""Whole parameters, each on one of the ranks that share it: gathered, computed with, and sent back.

The parameters that are split over the same axes are dealt out among the ranks along these, the largest first and each to the
rank that has least. One exchange brings every rank the pieces of its own, a second one takes the results back; both are an
all-to-all along each of the axes in turn. A message has as many elements for every rank as for the one that got most:

    rank            holds                   after the first exchange
    0               a0 b0 c0                a0 a1           (computes a)
    1               a1 b1 c1                b0 b1  c0 c1    (computes b and c, which are smaller)

Over axes along which ranks hold copies nothing is sent: each computes for itself.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardlib.collectives import primitives
from shardlib.mesh.mesh import Mesh
from shardlib.mesh.specs import shard_of
from shardlib.plan.buckets import Bucket
from shardlib.plan.payload import share
from shardlib.plan.plan import Plan


@dataclass(frozen=True)
class Member:
    """One parameter of a group: which of its bucket it is, the rank that computes it, and where it lies in a message."""

    path: str
    bucket: Bucket
    index: int
    computer: int
    place: int

    @property
    def chunk(self) -> int:
        return self.bucket.chunks[self.index]

    @property
    def span(self) -> slice:
        return slice(self.place, self.place + self.chunk)

    def of(self, tree: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """What this rank holds of it, padding included: a view."""
        start = sum(self.bucket.chunks[: self.index])
        return tree[self.bucket.name][start : start + self.chunk]


@dataclass(frozen=True)
class Group:
    """Parameters of one dtype that are split over the same axes, of which ``slices`` are the major ones.

    Attributes:
        width: elements of a message for each rank.
    """

    slices: tuple[str, ...]
    axes: tuple[str, ...]
    dtype: torch.dtype
    members: tuple[Member, ...]
    width: int


class WholeLeaves:
    """The trained parameters of a plan as whole ones."""

    def __init__(self, plan: Plan, mesh: Mesh) -> None:
        self._plan, self._mesh = plan, mesh

    def map(
        self, fn: Callable[[int, torch.Tensor], torch.Tensor], tree: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """``fn(number, parameter)`` of each, in its shape; returns what this rank holds of the results."""
        found = {name: torch.zeros_like(flat) for name, flat in tree.items()}
        for group in self._groups():
            ways, owners = self._ways(group.slices), self._ways(group.axes)
            sent = torch.zeros((ways * owners, group.width), dtype=group.dtype, device=self._mesh.device)
            for member in group.members:
                sent[member.computer, member.span] = member.of(tree)
            held = self._exchange(group, sent)
            results = torch.zeros_like(held)
            rows, result_rows = (part.view(ways, owners, group.width) for part in (held, results))
            for member in group.members:
                if member.computer == self._rank(group):
                    whole = self._assembled(member, group, rows[:, :, member.span])
                    self._cut(
                        fn(self._plan.numbering.numbers[member.path], whole),
                        member,
                        group,
                        result_rows[:, :, member.span],
                    )
            back = self._exchange(group, results)
            for member in group.members:
                member.of(found).copy_(back[member.computer, member.span])
        return found

    def sends(self) -> dict[str, int]:
        """Payload bytes of `map` by axis, equal on all ranks."""
        total: dict[str, int] = {}
        for group in self._groups():
            axes = (*group.slices, *group.axes)
            message = self._ways(axes) * group.width * group.dtype.itemsize
            for axis in axes:
                total[axis] = total.get(axis, 0) + 2 * share(message, self._mesh.shape[axis])
        return total

    def _groups(self) -> Iterator[Group]:
        found: dict[tuple[Any, ...], list[tuple[Bucket, int]]] = {}
        for bucket in self._plan.trained:
            for index, path in enumerate(bucket.paths):
                split = bucket.slices or bucket.axes
                key = (bucket.slices, bucket.axes, bucket.master_dtype or bucket.dtype, "" if split else path)
                found.setdefault(key, []).append((bucket, index))
        for (slices, axes, dtype, _), leaves in found.items():
            filled = [0] * self._ways((*slices, *axes))
            members = []
            for bucket, index in sorted(leaves, key=lambda leaf: -leaf[0].numels[leaf[1]]):
                computer = filled.index(min(filled))
                members.append(Member(bucket.paths[index], bucket, index, computer, filled[computer]))
                filled[computer] += bucket.chunks[index]
            yield Group(slices, axes, dtype, tuple(members), max(filled))

    def _ways(self, axes: Sequence[str]) -> int:
        return math.prod(self._mesh.shape[axis] for axis in axes)

    def _rank(self, group: Group) -> int:
        rank = 0
        for axis in (*group.slices, *group.axes):
            rank = rank * self._mesh.shape[axis] + self._mesh.coords[axis]
        return rank

    def _exchange(self, group: Group, message: torch.Tensor) -> torch.Tensor:
        """``[rank, width]`` for each rank -> ``[rank, width]`` from each rank."""
        axes = (*group.slices, *group.axes)
        message = message.view(*(self._mesh.shape[axis] for axis in axes), group.width)
        for dim, axis in enumerate(axes):
            rows = message.movedim(dim, 0).contiguous()
            out = torch.empty_like(rows)
            primitives.all_to_all(self._mesh, axis, out, rows).wait()
            message = out.movedim(0, dim)
        return message.reshape(self._ways(axes), group.width)

    def _coords(self, group: Group) -> Iterator[dict[str, int]]:
        """Of the slices, in order."""
        for place in itertools.product(*(range(self._mesh.shape[axis]) for axis in group.slices)):
            yield dict.fromkeys(self._mesh.shape, 0) | dict(zip(group.slices, place, strict=True))

    def _assembled(self, member: Member, group: Group, rows: torch.Tensor) -> torch.Tensor:
        """``rows[slice, owner]``: the pieces."""
        compute, shape = self._plan.placement_of[member.path].compute, member.bucket.shapes[member.index]
        local = [row.reshape(-1)[: math.prod(shape)].view(shape) for row in rows]
        if not group.slices:
            return local[0]
        whole = rows.new_empty(compute.shape)
        for piece, coords in zip(local, self._coords(group), strict=True):
            mine = shard_of(whole, compute.spec, self._mesh.shape, coords)
            mine.copy_(piece[: mine.shape[0]])  # without the rows that pad it
        return whole

    def _cut(self, whole: torch.Tensor, member: Member, group: Group, rows: torch.Tensor) -> None:
        """Into pieces ``rows[slice, owner]``; what pads them stays zero."""
        spec = self._plan.placement_of[member.path].compute.spec
        for row, coords in zip(rows, self._coords(group), strict=True):
            local = shard_of(whole, spec, self._mesh.shape, coords).reshape(-1)
            flat = local.new_zeros(row.numel())
            flat[: len(local)] = local
            row.copy_(flat.view(row.shape))
