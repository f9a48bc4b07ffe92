"""Rows of a state's tensors that move between ranks: which there are, and the all-to-all along each axis that moves them."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from shardlib.checkpoint.fragments import PARAMS, flat_states
from shardlib.checkpoint.residuals import residual_views
from shardlib.checkpoint.trees import CheckpointTrees
from shardlib.collectives import primitives
from shardlib.collectives.codecs.base import Kept
from shardlib.common._compat import storage_id
from shardlib.common.tensors import raw_bytes
from shardlib.errors import IllegalComposition, listing
from shardlib.mesh.mesh import Mesh
from shardlib.mesh.transport import Splits
from shardlib.plan.buckets import Bucket
from shardlib.plan.exchanges import Channel
from shardlib.tree import named_leaves, path_name

Place = tuple[int, ...]  # a rank's coordinates along all axes of the mesh
Coords = Mapping[str, int]


class Move(NamedTuple):
    """A run of elements that goes from one rank to another, or to another place on the same one.

    Attributes:
        source, target: the ranks.
        start: the index of the first element among those that ``source`` holds.
        into: its index among those that ``target`` holds.
        length: number of elements.
    """

    source: Place
    target: Place
    start: int
    into: int
    length: int


def moves(extents: Mapping[Place, range], row: int, came_from: Sequence[int]) -> Iterator[Move]:
    """The moves after which row r of a tensor holds what row ``came_from[r]`` held. What stays in its place is left out.

    Args:
        extents: the elements of the flattened tensor that each rank holds. Every element is held once.
        row: elements of a row.

    >>> from shardlib.checkpoint.reshard import moves
    >>> [tuple(move) for move in moves({(0,): range(0, 4), (1,): range(4, 8)}, row=2, came_from=[2, 1, 0, 3])]
    [((1,), (0,), 0, 0, 2), ((0,), (1,), 0, 0, 2)]
    """
    holders = sorted((extent.start, place) for place, extent in extents.items() if extent)
    starts = [start for start, _ in holders]
    for target, extent in extents.items():
        at = extent.start
        while at < extent.stop:
            new, within = divmod(at, row)
            wanted = came_from[new] * row + within
            source = holders[bisect_right(starts, wanted) - 1][1]
            held = extents[source]
            length = min((new + 1) * row, extent.stop) - at
            length = min(length, held.stop - wanted)
            if wanted != at:
                yield Move(source, target, wanted - held.start, at - extent.start, length)
            at += length


class RowsOnRanks(NamedTuple):
    """Elements of a tensor whose rows move.

    Attributes:
        data: those that this rank holds, in order: a view of the state.
        extents: the elements of the flattened tensor that this rank and those hold with which it exchanges rows.
        row: elements of a row.
    """

    data: torch.Tensor
    extents: Mapping[Place, range]
    row: int


class TensorMove(NamedTuple):
    """A move of one of several tensors, and its size in bytes."""

    tensor: int
    move: Move
    size: int


def moves_of(tensors: Sequence[RowsOnRanks], came_from: Sequence[int]) -> list[TensorMove]:
    """All moves among the ranks that exchange rows of ``tensors``, in the same order on each of them."""
    return [
        TensorMove(number, move, move.length * held.data.element_size())
        for number, held in enumerate(tensors)
        for move in moves(held.extents, held.row, came_from)
    ]


def sent_bytes(mesh: Mesh, moved: Sequence[TensorMove]) -> dict[str, int]:
    """Axis -> bytes that this rank sends when `move_rows` makes these moves."""
    axes = {axis: _AxisMoves(moved, _place(mesh), k, size) for k, (axis, size) in enumerate(mesh.shape.items())}
    return {axis: sum(along.bytes(along.sent)) for axis, along in axes.items()}


def move_rows(mesh: Mesh, tensors: Sequence[RowsOnRanks], came_from: Sequence[int]) -> None:
    """Make row r of each tensor what its row ``came_from[r]`` was, in place. Collective.

    Elements go along one axis after the other, so they pass through ranks that they are not for; at most through one for each
    axis but the last. All tensors travel in one message to each rank of an axis.
    """
    here, moved = _place(mesh), moves_of(tensors, came_from)
    flat = [held.data.reshape(-1) for held in tensors]
    held_here = {
        number: raw_bytes(flat[tensor][move.start : move.start + move.length]).to(mesh.device, copy=True)
        for number, (tensor, move, _) in enumerate(moved)
        if move.source == here
    }
    for k, (axis, size) in enumerate(mesh.shape.items()):
        along = _AxisMoves(moved, here, k, size)
        if not along.used:
            continue
        sent, received = along.bytes(along.sent), along.bytes(along.received)
        leaving = [held_here.pop(number) for numbers in along.sent for number in numbers]
        out = torch.cat([torch.empty(0, dtype=torch.uint8, device=mesh.device), *leaving])
        inp = out.new_empty(sum(received))
        primitives.all_to_all(mesh, axis, inp, out, Splits(sent, received)).wait()
        arriving = [number for numbers in along.received for number in numbers]
        held_here.update(zip(arriving, inp.split([moved[number].size for number in arriving]), strict=True))
    for number, data in held_here.items():
        tensor, move, _ = moved[number]
        raw_bytes(flat[tensor][move.into : move.into + move.length]).copy_(data)
    for rows, changed in zip(tensors, flat, strict=True):
        if not rows.data.is_contiguous():  # of which `changed` is a copy
            rows.data.copy_(changed.view(rows.data.shape))


class _AxisMoves:
    """The moves along axis k from and to this rank.

    Attributes:
        sent, received: their numbers, by the other rank's coordinate on the axis.
        used: whether anything goes along the axis between the ranks of this rank's line.
    """

    def __init__(self, moved: Sequence[TensorMove], here: Place, k: int, size: int) -> None:
        self._moved = moved
        self.sent: list[list[int]] = [[] for _ in range(size)]
        self.received: list[list[int]] = [[] for _ in range(size)]
        self.used = False
        for number, (_, move, _) in enumerate(moved):
            start, stop = move.source[k], move.target[k]
            if start == stop:
                continue
            before = *move.target[:k], *move.source[k:]
            if before[:k] == here[:k] and before[k + 1 :] == here[k + 1 :]:
                self.used = True
                if start == here[k]:
                    self.sent[stop].append(number)
                if stop == here[k]:
                    self.received[start].append(number)

    def bytes(self, numbers: Sequence[Sequence[int]]) -> list[int]:
        """Bytes to or from each rank of the axis."""
        return [sum(self._moved[number].size for number in some) for some in numbers]


def _place(mesh: Mesh, coords: Coords | None = None) -> Place:
    return tuple((coords or mesh.coords)[axis] for axis in mesh.shape)


class ExpertTensors:
    """The tensors of a state that have elements of the leaves at ``paths``, whose rows may change places.

    Raises:
        IllegalComposition: some of them cannot be moved by rows; lists them.
    """

    def __init__(self, trees: CheckpointTrees, paths: Iterable[str]) -> None:
        self._trees, self._plan, self._mesh = trees, trees.params.plan, trees.params.mesh
        self._paths = frozenset(paths)
        self._extents: dict[tuple[str, int], list[tuple[dict[Place, range], int]]] = {}
        self._check()

    def by_leaf(self) -> Iterator[tuple[str, RowsOnRanks]]:
        """Path of a leaf, and tensor with elements of it: the parameter, its master, the optimizer's trees, gradients that
        wait, further trees, and residuals. Ranks that exchange rows have them in the same order."""
        yield from self._flat()
        yield from self._residuals()

    def _check(self) -> None:
        packed = [
            f"{prefix}{path} (packed in few bits, or on disk)"
            for prefix, bucket, tensor, _ in self._buffers()
            if storage_id(tensor.untyped_storage()) in self._trees.packed
            for path in bucket.paths
            if path in self._paths
        ]
        nodes = named_leaves(self._trees.opt, lambda node: hasattr(node, "by_path"))
        kept = [
            f"opt/{path_name(path)}/{field}/{leaf} (of the whole parameter)"
            for path, node in nodes
            if hasattr(node, "by_path")
            for field in node.by_path()
            for leaf in getattr(node, field)
            if leaf in self._paths
        ]
        if packed or kept:
            raise IllegalComposition(
                f"relayout moves rows of tensors in memory, and not of these:\n{listing(packed + kept)}\nTrain with an "
                "optimizer whose state has the parameters' shapes, in memory (adamw, sgd, lion)."
            )

    def _buffers(self) -> Iterator[tuple[str, Bucket, torch.Tensor, int]]:
        """Prefix, leaves, flat tensor and level of all tensors of the buckets with leaves that move."""
        for bucket in self._plan.buckets:
            if not self._paths.isdisjoint(bucket.paths):
                yield PARAMS, bucket, self._trees.params.buffers[bucket.name], bucket.param_level
                for prefix, subset, tensor in flat_states(self._trees, bucket):
                    yield prefix, subset, tensor, subset.levels

    def _flat(self) -> Iterator[tuple[str, RowsOnRanks]]:
        for _, bucket, tensor, level in self._buffers():
            if (bucket.name, level) not in self._extents:
                every = [self._of_buffer(bucket, number, level) for number in range(len(bucket.paths))]
                self._extents[bucket.name, level] = every
            leaves = zip(
                bucket.paths, bucket.leaf_segments(tensor, level), self._extents[bucket.name, level], strict=True
            )
            for path, segment, (extents, row) in leaves:
                if path in self._paths:
                    yield path, RowsOnRanks(segment[: len(extents[_place(self._mesh)])], extents, row)

    def _of_buffer(self, bucket: Bucket, number: int, level: int) -> tuple[dict[Place, range], int]:
        """The extents of a leaf of a bucket at a level, and the elements of a row."""
        return self._among(bucket.paths[number], bucket.axes[:level], lambda at: bucket.extents(at, level)[number])

    def _residuals(self) -> Iterator[tuple[str, RowsOnRanks]]:
        for channel in self._plan.channels:
            for name, kept in channel.keeps.items():
                for path in channel.bucket.paths:
                    if kept.residual and path in self._paths:
                        yield path, self._residual(channel, self._trees.comm[name], kept, path)

    def _residual(self, channel: Channel, tensor: torch.Tensor, kept: Kept, path: str) -> RowsOnRanks:
        axes = channel.bucket.axes[: channel.level]
        if kept.by_row:
            axes = *axes, channel.axis

        def part(at: Coords) -> tuple[range, torch.Tensor]:
            for other, numel, start, data in residual_views(channel, tensor, kept, at):
                if other == path:
                    return range(start, max(start, min(start + data.numel(), numel))), data
            return range(0), tensor[:0]  # another rank's row has the leaf

        extents, row = self._among(path, axes, lambda at: part(at)[0])
        return RowsOnRanks(part(self._mesh.coords)[1], extents, row)

    def _among(
        self, path: str, axes: Sequence[str], extent: Callable[[Coords], range]
    ) -> tuple[dict[Place, range], int]:
        """What this rank, and those that hold other elements of a tensor, hold of the flattened tensor; and the elements of
        a row.

        Args:
            axes: on which the tensor is split beyond the leaf's slices.
            extent: of a slice, at coordinates.
        """
        compute, sizes = self._plan.placement_of[path].compute, self._plan.sizes
        among = [axis for axis in sizes if axis in ((*compute.spec.entries, ())[0] + tuple(axes))]
        extents, row = {}, 0
        for place in itertools.product(*(range(sizes[axis]) for axis in among)):
            at = {**self._mesh.coords, **dict(zip(among, place, strict=True))}
            window, held = compute.spec.window(compute.shape, sizes, at), extent(at)
            row = math.prod(window.sizes[1:])
            first = window.first[0] * row
            extents[_place(self._mesh, at)] = range(first + held.start, first + held.stop)
        return extents, row
