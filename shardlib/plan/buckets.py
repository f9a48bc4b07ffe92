"""Buckets: leaves of one unit that are gathered, reduced and updated as one flat buffer.

Every leaf is flattened, padded to a multiple of N (the product of the sizes of the bucket's axes) and cut into N chunks;
rank number r along those axes owns chunk r of every leaf. A bucket at *level* k is split over its first k axes: at level 0
a rank holds all of it, at the last level a rank holds what it owns. A buffer's elements occur in two orders:

    leaf-major  [leaf 0 | leaf 1 | ...]       each leaf's elements contiguous: for storage and computation
    rank-major  [owner 0 | owner 1 | ...]     each owner's elements contiguous: for collectives

The two orders coincide at the last level, on a mesh of one, and in a bucket of one leaf. Hence a large leaf is a bucket
of its own, which is gathered, reduced and updated without a copy, while small leaves are packed into common messages.
"""

from __future__ import annotations

import math
import re
from bisect import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple, overload

import torch

from shardlib.common._compat import (
    add_to_each_,
    chunk_cat,
    flatten_dense_tensors,
    func_transform,
    recording,
    unflatten_dense_tensors,
)
from shardlib.common.thresholds import Threshold
from shardlib.mesh.specs import chunk_size

# A leaf of which one rank owns at least this many elements is a bucket of its own. That saves copies of the leaf (two
# cores, gloo: 22 ms per gathered 135 MB) and costs about 0.1 ms per message.
_ALONE = Threshold(1 << 16)


@dataclass(frozen=True)
class LeafSpans(Sequence[tuple[int, int]]):
    """Start and stop of each leaf's elements in the chunks of some owners, in the order of a rank-major buffer.

    Computed when asked for: there are as many as owners times leaves.

    Attributes:
        chunks: elements of each leaf's chunk.
        held: elements of each leaf; what its chunks have more is padding.
        owners: the numbers of the owners.
    """

    chunks: tuple[int, ...]
    held: tuple[int, ...]
    owners: range

    def __len__(self) -> int:
        return len(self.owners) * len(self.chunks)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        start = 0
        for owner in self.owners:
            for chunk, numel in zip(self.chunks, self.held, strict=True):
                yield start, start + min(max(numel - owner * chunk, 0), chunk)
                start += chunk

    @overload
    def __getitem__(self, index: int) -> tuple[int, int]: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[tuple[int, int], ...]: ...
    def __getitem__(self, index: int | slice) -> tuple[int, int] | tuple[tuple[int, int], ...]:
        return tuple(self)[index]


def stands_alone(numel: int, ways: int) -> bool:
    """Whether a leaf of ``numel`` elements, split over ``ways`` owners, is large enough for a bucket of its own.

    False where nothing is split: a bucket of its own saves an all-reduce nothing, and adds a message.
    """
    return ways > 1 and chunk_size(numel, ways) >= _ALONE()


class BucketMemory(NamedTuple):
    """The memory that a bucket lives in: one of `shardlib.mesh.memories.MEMORIES` for each role."""

    param: str = "device"
    grad: str = "device"
    optimizer: str = "device"


DEVICE = BucketMemory()


@dataclass(frozen=True)
class Bucket:
    """Leaves that are laid out in one flat buffer.

    Attributes:
        name: unique within the plan.
        unit: name of the unit that the leaves belong to.
        paths: paths of the leaves, in the order of the buffer.
        shapes: shapes of the leaves in the loss (of their slices, under tensor slicing).
        dtype: of the parameters, as stored and as used in the loss.
        reduce_dtype: of the gradients, while they are summed and kept.
        master_dtype: of the optimizer's own copy of the parameters, or None.
        trainable: whether the leaves have gradients.
        axes: mesh axes that the optimizer state is split over, major to minor.
        sizes: sizes of ``axes``.
        param_level: how many of ``axes`` the stored parameters are split over.
        grad_level: how many of ``axes`` gradients are split over while they are accumulated.
        replicas: axes over which the bucket is replicated and its gradients are all-reduced.
        slices: axes of tensor slicing: the ranks along them hold different slices of the leaves, not copies.
        short: for slices that are padded with rows of zeros (see `shardlib.mesh.specs.P`): pairs of coordinates along
            ``slices`` and each leaf's number of elements there without padding. At other coordinates ``shapes`` hold.
        stages: the stages that use the bucket.
        homes: coordinates along the stages' axis whose ranks hold the bucket.
        memory: memory of the stored parameters, of the gradients and of the optimizer state.
        tiles: number of tiles in which the bucket's one leaf is gathered and reduced: see `cut`.
        home: of a tile, the unit that the leaf belongs to; else None.
    """

    name: str
    unit: str
    paths: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    reduce_dtype: torch.dtype
    master_dtype: torch.dtype | None
    trainable: bool
    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    param_level: int
    grad_level: int
    replicas: tuple[str, ...]
    slices: tuple[str, ...] = ()
    short: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()
    stages: tuple[int, ...] = (0,)
    homes: tuple[int, ...] = (0,)
    memory: BucketMemory = DEVICE
    tiles: int = 1
    home: str | None = None

    @cached_property
    def cut(self) -> tuple[Bucket, ...]:
        """The leaf's tiles, each a bucket and a unit of its own; the bucket itself if the leaf has no tiles.

        Each owner's rows are cut into as many equal parts as there are tiles, and a tile is one part of every owner. So every
        owner has a share of every tile, and its shares of all tiles, in order, are its chunk of the leaf.
        """
        if self.tiles == 1:
            return (self,)
        ((rows, *rest),) = self.shapes
        tile = replace(self, shapes=((rows // self.tiles, *rest),), tiles=1, home=self.unit)
        names = [f"{self.paths[0]} (tile {number} of {self.tiles})" for number in range(self.tiles)]
        return tuple(replace(tile, name=name, unit=name) for name in names)

    def of_tiles(self, buffer: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The parts of one owner's ``buffer`` that belong to the buckets of `cut`, in order (views)."""
        return (buffer,) if self.tiles == 1 else buffer.chunk(self.tiles)

    @property
    def label(self) -> str:
        """What a report calls the bucket: its unit, or its leaves if these belong to none."""
        more = f" and {len(self.paths) - 1} more" if len(self.paths) > 1 else ""
        return self.unit or self.paths[0] + more

    @property
    def fetched(self) -> bool:
        """Whether the stored parameters are brought to the device, whole, for each use: gathered, from another memory, or
        both."""
        return self.param_level > 0 or self.memory.param != "device"

    @cached_property
    def ways(self) -> int:
        """Number of owners: the product of the axes' sizes."""
        return math.prod(self.sizes)

    @cached_property
    def numels(self) -> tuple[int, ...]:
        return tuple(math.prod(shape) for shape in self.shapes)

    def held(self, coords: Mapping[str, int]) -> tuple[int, ...]:
        """Elements of each leaf's slice at these coordinates, without padding."""
        return self._short.get(tuple(coords[axis] for axis in self.slices), self.numels)

    @cached_property
    def _short(self) -> dict[tuple[int, ...], tuple[int, ...]]:
        return dict(self.short)

    @cached_property
    def chunks(self) -> list[int]:
        """Elements of each leaf that one rank owns, padding included."""
        return [chunk_size(numel, self.ways) for numel in self.numels]

    @cached_property
    def chunk_of(self) -> dict[str, int]:
        """Path -> elements of the leaf that one rank owns, padding included."""
        return dict(zip(self.paths, self.chunks, strict=True))

    @cached_property
    def owned(self) -> int:
        """Elements one rank owns of the bucket, padding included."""
        return sum(self.chunks)

    @cached_property
    def padded(self) -> bool:
        return any(chunk * self.ways != numel for chunk, numel in zip(self.chunks, self.numels, strict=True))

    @property
    def alone(self) -> bool:
        """Whether the bucket holds one leaf, so that leaf-major and rank-major order are the same."""
        return len(self.paths) == 1

    @property
    def levels(self) -> int:
        return len(self.axes)

    def owners(self, level: int) -> int:
        """Number of owners whose elements make up one buffer at ``level``."""
        return math.prod(self.sizes[level:])

    def size(self, level: int) -> int:
        """Elements of a buffer at ``level``."""
        return self.owners(level) * self.owned

    def owner(self, coords: Mapping[str, int], start: int, stop: int) -> int:
        """The index of the rank at ``coords`` along the axes that levels ``start`` to ``stop`` split over, as one number."""
        index = 0
        for axis, size in zip(self.axes[start:stop], self.sizes[start:stop]):
            index = index * size + coords[axis]
        return index

    def run(self, first: int, stop: int) -> Bucket:
        """Leaves ``first`` to ``stop`` as a bucket of their own; the bucket itself if these are all its leaves. A run of a
        run is one of the bucket, and called so."""
        if stop - first == len(self.paths):
            return self
        whole, before, _ = run_of(self.name) or (self.name, 0, 0)
        name = f"{whole}[{before + first}:{before + stop}]"
        short = tuple((coords, held[first:stop]) for coords, held in self.short)
        return replace(self, name=name, paths=self.paths[first:stop], shapes=self.shapes[first:stop], short=short)

    def filled(self, coords: Mapping[str, int], level: int) -> LeafSpans:
        """Start and stop of each leaf's elements, without padding, in the rank-major buffer at ``level`` of ``coords``."""
        owners = self.owners(level)
        first = self.owner(coords, 0, level) * owners
        return LeafSpans(tuple(self.chunks), tuple(self.held(coords)), range(first, first + owners))

    def extents(self, coords: Mapping[str, int], level: int) -> list[range]:
        """The elements of each leaf's flattened slice that the buffer at ``level`` of ``coords`` holds, without padding."""
        index, sizes = self.owner(coords, 0, level), self.segment_sizes(level)
        return [
            range(index * size, max(index * size, min((index + 1) * size, numel)))
            for size, numel in zip(sizes, self.held(coords), strict=True)
        ]

    def leaf_segments(self, buffer: torch.Tensor, level: int) -> list[torch.Tensor]:
        """Each leaf's flat segment of a leaf-major buffer at ``level``, padding included (views)."""
        return list(torch.split_with_sizes(buffer, self.segment_sizes(level)))

    def segment_sizes(self, level: int) -> list[int]:
        """Elements of each leaf's segment of a leaf-major buffer at ``level``, padding included."""
        owners = self.owners(level)
        return [chunk * owners for chunk in self.chunks]

    def path_at(self, element: int) -> str:
        """The path of the leaf to which an element of a whole, leaf-major buffer belongs."""
        return self.paths[bisect(self._starts, element) - 1]

    @cached_property
    def _starts(self) -> list[int]:
        return list(accumulate(self.segment_sizes(0)[:-1], initial=0))

    def leaves(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """The leaves of a whole (level 0), leaf-major buffer, in shape and without padding (views)."""
        if not self.padded:
            return list(unflatten_dense_tensors(buffer, self._templates))
        segments = zip(self.leaf_segments(buffer, 0), self.numels, self.shapes, strict=True)
        return [segment[:numel].view(shape) for segment, numel, shape in segments]

    @cached_property
    def _templates(self) -> list[torch.Tensor]:
        """Meta tensors of the leaves' shapes."""
        return [torch.empty(shape, device="meta") for shape in self.shapes]

    def owner_segment(self, buffer: torch.Tensor, level: int, index: int) -> torch.Tensor:
        """Owner ``index``'s elements of a leaf-major buffer at ``level``, contiguous; a view in a bucket of one leaf."""
        owners = self.owners(level)
        if owners == 1:
            return buffer
        if self.alone:
            return buffer.view(owners, -1)[index]
        return torch.cat([part[:, index] for part in self._parts(buffer, owners)], dim=1).view(-1)

    def in_leaves(self, rows: torch.Tensor, buffer: torch.Tensor) -> None:
        """Write ``rows`` [ways, n], leaf-major buffers of a part of each leaf, to the leaf-major ``buffer`` [ways·n]."""
        ways = len(rows)
        parts = self._parts(buffer, ways)
        widths = [part.shape[2] for part in parts]
        if self._period == len(self.chunks):
            torch.split_with_sizes_copy(rows, widths, dim=1, out=[part[0] for part in parts])
        else:
            rows = rows.view(ways, len(self.chunks) // self._period, sum(widths))
            torch.split_with_sizes_copy(rows, widths, dim=2, out=[part.transpose(0, 1) for part in parts])

    def _parts(self, buffer: torch.Tensor, ways: int) -> list[torch.Tensor]:
        """The leaves of a leaf-major buffer, each cut into ``ways`` parts, [count, ways, n]: views, of which one has all
        leaves that are at the same place in blocks that are alike."""
        table = buffer.view(len(self.chunks) // self._period, -1)
        scale = buffer.numel() // self.owned if self.owned else 0
        segments = table.split([chunk * scale for chunk in self.chunks[: self._period]], dim=1)
        return [segment.unflatten(1, (ways, -1)) for segment in segments]

    @cached_property
    def _period(self) -> int:
        """After how many leaves the chunks' sizes repeat, as those of equal blocks do; all leaves if they do not."""
        count = len(self.chunks)
        periods = (period for period in range(1, count) if count % period == 0)
        return next((n for n in periods if self.chunks[n:] == self.chunks[:-n]), count)

    def unpack(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """The leaves of a whole, rank-major buffer, in shape and without padding: the inverse of `pack`."""
        columns = packed.view(self.ways, -1).split(self.chunks, dim=1)
        return [
            column.reshape(-1)[:numel].view(shape)
            for column, numel, shape in zip(columns, self.numels, self.shapes, strict=True)
        ]

    def add_leaves(self, packed: torch.Tensor, leaves: Sequence[torch.Tensor | None]) -> None:
        """Add whole leaves (None is zero) to a whole, rank-major buffer, in place."""
        columns = packed.view(self.ways, -1).split(self.chunks, dim=1)
        present = [(column, leaf) for column, leaf in zip(columns, leaves, strict=True) if leaf is not None]
        addends = [self._cut(leaf, column.shape[1]).to(packed.dtype) for column, leaf in present]
        add_to_each_([column for column, _ in present], addends)

    def _cut(self, leaf: torch.Tensor, chunk: int) -> torch.Tensor:
        """A whole leaf as (owners, chunk), padded with zeros; a view where no copy is needed."""
        flat = leaf.to_dense().reshape(-1) if leaf.is_sparse else leaf.reshape(-1)
        if chunk * self.ways != leaf.numel():
            flat = torch.nn.functional.pad(flat, (0, chunk * self.ways - leaf.numel()))
        return flat.view(self.ways, chunk)

    def _divided(self, leaf: torch.Tensor) -> torch.Tensor:
        """A whole leaf whose first dimension, if padded, is divided among the owners as its elements are."""
        return leaf if leaf.dim() and leaf.shape[0] % self.ways == 0 else leaf.reshape(-1)

    def pack(self, leaves: Sequence[torch.Tensor | None], dtype: torch.dtype) -> torch.Tensor:
        """One whole, rank-major buffer of ``dtype`` from whole leaves (None is zero), padded with zeros.

        In a bucket of one leaf the buffer is a view of the leaf where dtype and size allow. Differentiable, so that second
        derivatives pass through the packing of a gradient.
        """
        present = [leaf for leaf in leaves if leaf is not None]
        # Whether the result is differentiated or mapped.
        values = torch.is_grad_enabled() or func_transform() is not None
        if not values and len(present) == len(leaves) > 1 and all(_is_plain(leaf, dtype) for leaf in present):
            if self.ways == 1:
                return flatten_dense_tensors(present)  # torch's own loops are cheap
            if 0 not in self.numels:
                return chunk_cat([self._divided(leaf) for leaf in present], 0, self.ways).view(-1)
        device = next((leaf.device for leaf in leaves if leaf is not None), None)
        columns = []
        for leaf, chunk in zip(leaves, self.chunks, strict=True):
            if leaf is None:
                columns.append(torch.zeros((self.ways, chunk), dtype=dtype, device=device))
            else:
                columns.append(self._cut(leaf, chunk))
        if self.alone:
            return columns[0].to(dtype).contiguous().view(-1)  # the gradient of a sum has the stride 0
        # A graph is worth more without writes: passes may move what packs a gradient.
        if values or recording() or any(column.dtype != columns[0].dtype for column in columns):
            return torch.cat([column.to(dtype) for column in columns], dim=1).view(-1)
        out = torch.empty((self.ways, self.owned), dtype=dtype, device=columns[0].device)
        return torch.cat(columns, dim=1, out=out).view(-1)


def run_of(name: str) -> tuple[str, int, int] | None:
    """The name of the bucket that a run (see `Bucket.run`) is of, with its first leaf and the one after its last; None for
    the name of a bucket."""
    match = re.fullmatch(r"(.*)\[(\d+):(\d+)\]", name)
    return match and (match[1], int(match[2]), int(match[3]))


def _is_plain(leaf: torch.Tensor, dtype: torch.dtype) -> bool:
    return leaf.dtype == dtype and leaf.layout is torch.strided
