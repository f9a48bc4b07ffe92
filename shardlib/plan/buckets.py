"""Buckets: leaves of one unit that are gathered, reduced and updated as one flat buffer.

Every leaf is flattened, padded to a multiple of N (the product of the bucket's axes) and cut into N chunks; rank
number r along those axes owns chunk r of every leaf. A bucket at *level* k is split over its first k axes: level 0
is whole, the last level is what one rank owns. Two orders of the same elements occur:

    leaf-major  [leaf 0 | leaf 1 | ...]       each leaf's part contiguous: what is stored and computed with
    rank-major  [owner 0 | owner 1 | ...]     each owner's part contiguous: what collectives exchange

They coincide at the last level, on a mesh of one, and in a bucket of one leaf. Hence a large leaf is a bucket of
its own: it is gathered, reduced and updated where it lies, while small leaves are packed into common messages.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch

from shardlib._compat import add_to_each_, flatten_dense_tensors, unflatten_dense_tensors
from shardlib.kernels.common.thresholds import Threshold
from shardlib.mesh.specs import chunk_size

# Elements that one rank owns of a leaf from which it is a bucket of its own. That saves copies of the leaf (two cores,
# gloo: 22 ms per gathered 135 MB) and costs about 0.1 ms per message.
_ALONE = Threshold(1 << 16)


def stands_alone(numel: int, ways: int) -> bool:
    """Whether a leaf of ``numel`` elements, split over ``ways`` owners, is large enough for a bucket of its own.

    Not where nothing is split: an all-reduce gains nothing by it, and costs more per message.
    """
    return ways > 1 and chunk_size(numel, ways) >= _ALONE()


class Memory(NamedTuple):
    """The memory that a bucket lives in: one of `shardlib.mesh.specs.MEMORIES` for each role."""

    param: str = "device"
    grad: str = "device"
    optimizer: str = "device"


DEVICE = Memory()


@dataclass(frozen=True)
class Bucket:
    """Leaves laid out together.

    Attributes:
        name: unique within the plan.
        unit: name of the unit it belongs to.
        paths: the leaves, in order.
        shapes: their shapes where they are used (the compute shards).
        dtype: as stored and used in the loss.
        reduce_dtype: of gradients as they are summed and kept.
        master_dtype: of the optimizer's own copy of the parameters, or None.
        trainable: whether gradients flow.
        axes: mesh axes the optimizer state is split over, major to minor, with ``sizes``.
        param_level: how many of them the stored parameters are split over.
        grad_level: how many of them gradients are split over while they are accumulated.
        replicas: axes over which the bucket is replicated and its gradients are all-reduced.
        slices: axes that the leaves are slices over: other values, not copies, on their ranks.
        short: coordinates along ``slices``, and how many elements of each leaf lie there: of slices that rows of zeros
            pad (see `shardlib.mesh.specs.P`). Elsewhere ``shapes`` tell.
        stages: those that use it.
        homes: the coordinates along the stages' axis that hold it.
        memory: where it lives, as stored, as gradient and in the optimizer's layout.
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
    memory: Memory = DEVICE

    @cached_property
    def ways(self) -> int:
        """Number of owners: the product of the axes' sizes."""
        return math.prod(self.sizes)

    @cached_property
    def numels(self) -> tuple[int, ...]:
        return tuple(math.prod(shape) for shape in self.shapes)

    def held(self, coords: Mapping[str, int]) -> tuple[int, ...]:
        """Elements of each leaf's slice at these coordinates, without what pads it."""
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
        """Whether it holds one leaf: then both orders of its elements are the same."""
        return len(self.paths) == 1

    @property
    def levels(self) -> int:
        return len(self.axes)

    def parts(self, level: int) -> int:
        """Owners that share one buffer at ``level``."""
        return math.prod(self.sizes[level:])

    def size(self, level: int) -> int:
        """Elements of a buffer at ``level``."""
        return self.parts(level) * self.owned

    def owner(self, coords: Mapping[str, int], start: int, stop: int) -> int:
        """The number of the rank at ``coords`` among the owners that levels ``start`` to ``stop`` tell apart."""
        index = 0
        for axis, size in zip(self.axes[start:stop], self.sizes[start:stop]):
            index = index * size + coords[axis]
        return index

    def part(self, first: int, stop: int) -> Bucket:
        """Leaves ``first`` to ``stop`` as a bucket of their own; the bucket itself if these are all."""
        if stop - first == len(self.paths):
            return self
        name = f"{self.name}[{first}:{stop}]"
        short = tuple((place, held[first:stop]) for place, held in self.short)
        return replace(self, name=name, paths=self.paths[first:stop], shapes=self.shapes[first:stop], short=short)

    def filled(self, coords: Mapping[str, int], start: int) -> tuple[tuple[int, int], ...]:
        """From where to where each leaf's elements lie, padding left out, in the part of level ``start`` at ``coords``.

        The part is rank-major: what each of its owners owns, one after another.
        """
        owners = self.parts(start)
        first = self.owner(coords, 0, start) * owners
        spans, place, held = [], 0, self.held(coords)
        for owner in range(first, first + owners):
            for chunk, numel in zip(self.chunks, held, strict=True):
                spans.append((place, place + min(max(numel - owner * chunk, 0), chunk)))
                place += chunk
        return tuple(spans)

    def leaf_parts(self, buffer: torch.Tensor, level: int) -> list[torch.Tensor]:
        """Each leaf's flat part of a leaf-major buffer, padding included (views)."""
        return list(torch.split_with_sizes(buffer, self.part_sizes(level)))

    def part_sizes(self, level: int) -> list[int]:
        """Elements of each leaf's part of a leaf-major buffer."""
        parts = self.parts(level)
        return [chunk * parts for chunk in self.chunks]

    def leaves(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """The leaves of a whole (level 0), leaf-major buffer, in shape and without padding (views)."""
        if not self.padded:
            return list(unflatten_dense_tensors(buffer, self._templates))
        parts = self.leaf_parts(buffer, 0)
        return [part[:numel].view(shape) for part, numel, shape in zip(parts, self.numels, self.shapes, strict=True)]

    @cached_property
    def _templates(self) -> list[torch.Tensor]:
        """Tensors without memory that have the leaves' shapes."""
        return [torch.empty(shape, device="meta") for shape in self.shapes]

    def owned_part(self, buffer: torch.Tensor, level: int, index: int) -> torch.Tensor:
        """Owner ``index``'s elements of a leaf-major buffer, contiguous; a view where one leaf is alone."""
        parts = self.parts(level)
        if parts == 1:
            return buffer
        if self.alone:
            return buffer.view(parts, -1)[index]
        return torch.cat([part.view(parts, -1)[index] for part in self.leaf_parts(buffer, level)])

    def unpack(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """The leaves of a whole, rank-major buffer, in shape and without padding: what `pack` was given."""
        columns = packed.view(self.ways, -1).split(self.chunks, dim=1)
        return [
            column.reshape(-1)[:numel].view(shape)
            for column, numel, shape in zip(columns, self.numels, self.shapes, strict=True)
        ]

    def add_leaves(self, packed: torch.Tensor, leaves: Sequence[torch.Tensor | None]) -> None:
        """Add whole leaves (None is zero) to a whole, rank-major buffer, in place."""
        columns = packed.view(self.ways, -1).split(self.chunks, dim=1)
        present = [(column, leaf) for column, leaf in zip(columns, leaves, strict=True) if leaf is not None]
        parts = [self._cut(leaf, column.shape[1]).to(packed.dtype) for column, leaf in present]
        add_to_each_([column for column, _ in present], parts)

    def _cut(self, leaf: torch.Tensor, chunk: int) -> torch.Tensor:
        """A whole leaf as (owners, chunk), padded with zeros; a view where it can be."""
        flat = leaf.to_dense().reshape(-1) if leaf.is_sparse else leaf.reshape(-1)
        if chunk * self.ways != leaf.numel():
            flat = torch.nn.functional.pad(flat, (0, chunk * self.ways - leaf.numel()))
        return flat.view(self.ways, chunk)

    def pack(self, leaves: Sequence[torch.Tensor | None], dtype: torch.dtype) -> torch.Tensor:
        """Whole leaves (None is zero) to one whole, rank-major buffer of ``dtype``, padded with zeros.

        A leaf that is alone is not copied where it is right as it is. Differentiable, so that gradients of gradients
        flow through the packing of a gradient.
        """
        present = [leaf for leaf in leaves if leaf is not None]
        if self.ways == 1 and len(present) == len(leaves) > 1 and all(_is_plain(leaf, dtype) for leaf in present):
            return flatten_dense_tensors(present)  # torch's own loop: many small leaves are cheap
        device = next((leaf.device for leaf in leaves if leaf is not None), None)
        columns = []
        for leaf, chunk in zip(leaves, self.chunks, strict=True):
            if leaf is None:
                columns.append(torch.zeros((self.ways, chunk), dtype=dtype, device=device))
            else:
                columns.append(self._cut(leaf, chunk))
        if self.alone:
            return columns[0].to(dtype).view(-1)
        if torch.is_grad_enabled() or any(column.dtype != columns[0].dtype for column in columns):
            return torch.cat([column.to(dtype) for column in columns], dim=1).view(-1)
        out = torch.empty((self.ways, self.owned), dtype=dtype, device=columns[0].device)
        return torch.cat(columns, dim=1, out=out).view(-1)


def _is_plain(leaf: torch.Tensor, dtype: torch.dtype) -> bool:
    return leaf.dtype == dtype and leaf.layout is torch.strided
