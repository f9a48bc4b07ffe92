"""The tensors of a train state that have experts along dimension 0, and which elements of them each rank holds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch

from shardlib.checkpoint.fragments import flat_states
from shardlib.checkpoint.packed import CheckpointTrees
from shardlib.checkpoint.relayout.journey import MovingRows, Place
from shardlib.checkpoint.residuals import residual_views
from shardlib.collectives.codecs.base import Kept
from shardlib.common._compat import storage_id
from shardlib.errors import IllegalComposition, listing
from shardlib.plan.buckets import Bucket
from shardlib.plan.exchanges import Channel
from shardlib.tree import named_leaves, path_name

Coords = Mapping[str, int]


class Tensors:
    """The tensors of a state that have elements of the leaves at ``paths``, whose rows may change places.

    Raises:
        IllegalComposition: some of them cannot be moved by rows; lists them.
    """

    def __init__(self, parts: CheckpointTrees, paths: Iterable[str]) -> None:
        self._parts, self._plan, self._mesh = parts, parts.params.plan, parts.params.mesh
        self._paths = frozenset(paths)
        self._here = self._place(self._mesh.coords)
        self._extents: dict[tuple[str, int], list[tuple[dict[Place, range], int]]] = {}
        self._check()

    def by_leaf(self) -> Iterator[tuple[str, MovingRows]]:
        """Path of a leaf, and tensor with elements of it: the parameter, its master, the optimizer's trees, gradients that
        wait, further trees, and residuals. Ranks that exchange rows have them in the same order."""
        yield from self._flat()
        yield from self._residuals()

    def _check(self) -> None:
        packed = [
            f"{prefix}{path} (packed in few bits, or on disk)"
            for prefix, bucket, tensor, _ in self._buffers()
            if storage_id(tensor.untyped_storage()) in self._parts.packed
            for path in bucket.paths
            if path in self._paths
        ]
        nodes = named_leaves(self._parts.opt, lambda node: hasattr(node, "by_path"))
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
                f"relayout moves the rows of tensors in memory, and cannot move these:\n{listing(packed + kept)}\nTrain with "
                "an optimizer whose state has the shape of the parameters, in memory (adamw, sgd, lion, …)."
            )

    def _buffers(self) -> Iterator[tuple[str, Bucket, torch.Tensor, int]]:
        """Prefix, leaves, flat tensor and level of all tensors of the buckets with leaves that move."""
        for bucket in self._plan.buckets:
            if not self._paths.isdisjoint(bucket.paths):
                yield "params/", bucket, self._parts.params.buffers[bucket.name], bucket.param_level
                for prefix, subset, tensor in flat_states(self._parts, bucket):
                    yield prefix, subset, tensor, subset.levels

    def _flat(self) -> Iterator[tuple[str, MovingRows]]:
        for _, bucket, tensor, level in self._buffers():
            if (bucket.name, level) not in self._extents:
                runs = [self._of_buffer(bucket, number, level) for number in range(len(bucket.paths))]
                self._extents[bucket.name, level] = runs
            segments = bucket.leaf_segments(tensor, level)
            for path, segment, (extents, row) in zip(
                bucket.paths, segments, self._extents[bucket.name, level], strict=True
            ):
                if path in self._paths:
                    yield path, MovingRows(segment[: len(extents[self._here])], extents, row)

    def _of_buffer(self, bucket: Bucket, number: int, level: int) -> tuple[dict[Place, range], int]:
        """The extents of a leaf of a bucket at a level, and the elements of a row."""
        return self._among(bucket.paths[number], bucket.axes[:level], lambda at: bucket.extents(at, level)[number])

    def _residuals(self) -> Iterator[tuple[str, MovingRows]]:
        for channel in self._plan.channels:
            for name, kept in channel.keeps.items():
                for path in channel.bucket.paths:
                    if kept.residual and path in self._paths:
                        yield path, self._residual(channel, self._parts.comm[name], kept, path)

    def _residual(self, channel: Channel, tensor: torch.Tensor, kept: Kept, path: str) -> MovingRows:
        axes = channel.bucket.axes[: channel.level]
        if kept.by_row:
            axes = *axes, channel.axis

        def part(at: Coords) -> tuple[range, torch.Tensor]:
            for other, numel, start, data in residual_views(channel, tensor, kept, at):
                if other == path:
                    return range(start, max(start, min(start + data.numel(), numel))), data
            return range(0), tensor[:0]  # another rank's row has the leaf

        extents, row = self._among(path, axes, lambda at: part(at)[0])
        return MovingRows(part(self._mesh.coords)[1], extents, row)

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
            extents[self._place(at)] = range(first + held.start, first + held.stop)
        return extents, row

    def _place(self, at: Coords) -> Place:
        return tuple(at[axis] for axis in self._mesh.shape)
