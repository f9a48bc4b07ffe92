"""Functions of whole parameters, each computed on one of the ranks that the parameter is split over.

The parameters that are split over the same axes are assigned to the ranks along these axes, the largest first, each to the
rank with the least work so far. One exchange brings every rank the shards of its parameters, a second one sends the results
back. An exchange is an all-to-all along each of the axes in turn. All its messages are as long as the longest:

    rank            holds                   after the first exchange
    0               a0 b0 c0                a0 a1           (computes a)
    1               a1 b1 c1                b0 b1  c0 c1    (computes b and c, which are smaller)

Nothing is sent along axes whose ranks hold copies: each of them computes all of its parameters.
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
from shardlib.plan.exchanges import share
from shardlib.plan.plan import Plan


@dataclass(frozen=True)
class Member:
    """One parameter of a group.

    Attributes:
        path: the parameter's path.
        bucket, index: its bucket, and its index among the bucket's leaves.
        computer: the rank (along the group's axes) that computes it.
        start: the index of its first element in a message to or from this rank.
    """

    path: str
    bucket: Bucket
    index: int
    computer: int
    start: int

    @property
    def chunk(self) -> int:
        return self.bucket.chunks[self.index]

    @property
    def span(self) -> slice:
        """The parameter's elements in a message."""
        return slice(self.start, self.start + self.chunk)

    def of(self, tree: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The view of this rank's shard in a tree of flat buffers, padding included."""
        start = sum(self.bucket.chunks[: self.index])
        return tree[self.bucket.name][start : start + self.chunk]


@dataclass(frozen=True)
class LeafGroup:
    """Parameters of one dtype that are split over the same axes.

    Attributes:
        slices: the axes of tensor slicing, major to the others.
        axes: the other axes that the parameters are split over.
        width: elements of a message between two ranks.
    """

    slices: tuple[str, ...]
    axes: tuple[str, ...]
    dtype: torch.dtype
    members: tuple[Member, ...]
    width: int


class Exchanges:
    """A count of the exchanges of one update, by which a rank that fails in it makes those that other ranks wait for.

    Attributes:
        repeated: whether the update is made once more, for the exchanges that were left out: what it computes is nobody's.
    """

    repeated: bool

    def __init__(self) -> None:
        self._made = self._left_out = 0
        self.repeated = False

    def begin(self) -> None:
        """Count from 0."""
        self._made = self._left_out = 0
        self.repeated = False

    def again(self) -> None:
        """Leave out those that were made: the update is made once more."""
        self._left_out, self._made = self._made, 0
        self.repeated = True

    def due(self) -> bool:
        """Whether the next exchange is to be made."""
        self._made += 1
        return self._made > self._left_out


class WholeLeaves:
    """Functions of the trained parameters of a plan, as whole tensors.

    Args:
        exchanges: counts the messages. Nothing is computed where they are ``repeated``, since it may be what has failed.
    """

    def __init__(self, plan: Plan, mesh: Mesh, exchanges: Exchanges) -> None:
        self._plan, self._mesh, self._exchanges = plan, mesh, exchanges

    def map(
        self, fn: Callable[[int, torch.Tensor], torch.Tensor], tree: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """This rank's shards of ``fn(number, parameter)`` for each parameter, which ``fn`` gets in its shape."""
        shards = {name: torch.zeros_like(flat) for name, flat in tree.items()}
        for group in self._groups():
            ways, owners = self._ways(group.slices), self._ways(group.axes)
            sent = torch.zeros((ways * owners, group.width), dtype=group.dtype, device=self._mesh.device)
            for member in group.members:
                sent[member.computer, member.span] = member.of(tree)
            held = self._exchange(group, sent)
            results = torch.zeros_like(held)
            rows, result_rows = (message.view(ways, owners, group.width) for message in (held, results))
            for member in group.members:
                if member.computer == self._rank(group) and not self._exchanges.repeated:
                    whole = self._assembled(member, group, rows[:, :, member.span])
                    self._cut(
                        fn(self._plan.numbering.numbers[member.path], whole),
                        member,
                        group,
                        result_rows[:, :, member.span],
                    )
            back = self._exchange(group, results)
            for member in group.members:
                member.of(shards).copy_(back[member.computer, member.span])
        return shards

    def sends(self) -> dict[str, int]:
        """Axis -> payload bytes of `map`, equal on all ranks."""
        total: dict[str, int] = {}
        for group in self._groups():
            axes = (*group.slices, *group.axes)
            message = self._ways(axes) * group.width * group.dtype.itemsize
            for axis in axes:
                total[axis] = total.get(axis, 0) + 2 * share(message, self._mesh.shape[axis])
        return total

    def _groups(self) -> Iterator[LeafGroup]:
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
            yield LeafGroup(slices, axes, dtype, tuple(members), max(filled))

    def _ways(self, axes: Sequence[str]) -> int:
        return math.prod(self._mesh.shape[axis] for axis in axes)

    def _rank(self, group: LeafGroup) -> int:
        rank = 0
        for axis in (*group.slices, *group.axes):
            rank = rank * self._mesh.shape[axis] + self._mesh.coords[axis]
        return rank

    def _exchange(self, group: LeafGroup, message: torch.Tensor) -> torch.Tensor:
        """Exchange ``message``, ``[rank, width]`` with a row for each rank; returns ``[rank, width]`` with a row from
        each."""
        axes = (*group.slices, *group.axes)
        message = message.view(*(self._mesh.shape[axis] for axis in axes), group.width)
        for dim, axis in enumerate(axes):
            if not self._exchanges.due():
                continue
            rows = message.movedim(dim, 0).contiguous()
            out = torch.empty_like(rows)
            primitives.all_to_all(self._mesh, axis, out, rows).wait()
            message = out.movedim(0, dim)
        return message.reshape(self._ways(axes), group.width)

    def _coords(self, group: LeafGroup) -> Iterator[dict[str, int]]:
        """The coordinates of each slice of a group, in order."""
        for indices in itertools.product(*(range(self._mesh.shape[axis]) for axis in group.slices)):
            yield dict.fromkeys(self._mesh.shape, 0) | dict(zip(group.slices, indices, strict=True))

    def _assembled(self, member: Member, group: LeafGroup, rows: torch.Tensor) -> torch.Tensor:
        """The whole parameter from its shards ``rows[slice, owner]``."""
        compute, shape = self._plan.placement_of[member.path].compute, member.bucket.shapes[member.index]
        local = [row.reshape(-1)[: math.prod(shape)].view(shape) for row in rows]
        if not group.slices:
            return local[0]
        whole = rows.new_empty(compute.shape)
        for padded, coords in zip(local, self._coords(group), strict=True):
            view = shard_of(whole, compute.spec, self._mesh.shape, coords)
            view.copy_(padded[: view.shape[0]])
        return whole

    def _cut(self, whole: torch.Tensor, member: Member, group: LeafGroup, rows: torch.Tensor) -> None:
        """Copy a whole parameter to its shards ``rows[slice, owner]``; padding is zero."""
        spec = self._plan.placement_of[member.path].compute.spec
        for row, coords in zip(rows, self._coords(group), strict=True):
            local = shard_of(whole, spec, self._mesh.shape, coords).reshape(-1)
            flat = local.new_zeros(row.numel())
            flat[: len(local)] = local
            row.copy_(flat.view(row.shape))
