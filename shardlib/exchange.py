"""Moving buckets between levels: gathers towards whole, reductions towards what one rank owns.

Each starts at once and is finished by `wait`. Over several axes the first exchange is under way while the caller
goes on, and the others follow when it is waited for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardlib.collectives import primitives
from shardlib.layout import Bucket
from shardlib.mesh import Mesh


class Gather:
    """A leaf-major buffer of level ``stop`` on its way to level ``start``, into ``out`` when given."""

    def __init__(
        self, mesh: Mesh, bucket: Bucket, buffer: torch.Tensor, start: int, stop: int, out: torch.Tensor | None = None
    ) -> None:
        self._mesh, self._bucket, self._start = mesh, bucket, start
        self._level, self._buffer, self._out = stop, buffer, out
        self._launch()

    def _launch(self) -> None:
        """Send for the next level: large leaves straight to their place, small ones together."""
        self._level -= 1
        bucket, level = self._bucket, self._level
        axis, ways = bucket.axes[level], bucket.sizes[level]
        out = self._out if level == self._start else None
        whole = self._buffer.new_empty(bucket.size(level)) if out is None else out
        alone, small = bucket.large, bucket.small
        places = bucket.leaf_parts(whole, level)
        mine = bucket.leaf_parts(self._buffer, level + 1) if alone else []
        self._works = [primitives.all_gather(self._mesh, axis, places[place], mine[place]) for place in alone]
        self._small: list[torch.Tensor] = []
        if small:
            packed = torch.cat([mine[place] for place in small]) if alone else self._buffer
            self._small = [places[place].view(ways, -1) for place in small]
            self._gathered = packed.new_empty(ways, packed.numel())
            self._works.append(primitives.all_gather(self._mesh, axis, self._gathered, packed))
        self._buffer = whole

    def _land(self) -> None:
        for work in self._works:
            work.wait()
        if self._small:
            widths = [place.shape[1] for place in self._small]
            torch.split_with_sizes_copy(self._gathered, widths, dim=1, out=self._small)
            del self._gathered

    def wait(self) -> torch.Tensor:
        """The gathered, leaf-major buffer (``out``, when given)."""
        self._land()
        while self._level > self._start:
            self._launch()
            self._land()
        return self._buffer


class Reduction:
    """A rank-major buffer of partial sums of level ``start`` on its way to level ``stop``.

    Args:
        replicas: sum over the bucket's replica axes at the end.
        in_place: leave each result in this rank's part of the buffer that came in.
    """

    def __init__(
        self, mesh: Mesh, bucket: Bucket, buffer: torch.Tensor, start: int, stop: int, *, replicas: bool, in_place: bool
    ) -> None:
        self._mesh, self._bucket, self._in_place = mesh, bucket, in_place
        self._buffer = buffer
        scatters = [(bucket.axes[level], True) for level in range(start, stop)]
        sums = [(axis, False) for axis in bucket.replicas] if replicas else []
        self._todo = scatters + sums
        self._launch()

    def _launch(self) -> None:
        if not self._todo:
            self._work = None
            return
        axis, scatter = self._todo.pop(0)
        inp = self._buffer
        if not scatter:
            self._work = primitives.all_reduce(self._mesh, axis, inp)
            return
        chunks = inp.view(self._mesh.shape[axis], -1)
        self._buffer = chunks[self._mesh.coords[axis]] if self._in_place else torch.empty_like(chunks[0])
        self._work = primitives.reduce_scatter(self._mesh, axis, self._buffer, inp)

    def wait(self) -> torch.Tensor:
        """The summed buffer at level ``stop``."""
        while self._work is not None:
            self._work.wait()
            self._launch()
        return self._buffer


class LeafReduction:
    """Whole leaves of partial sums on their way to what this rank owns of a bucket split over one axis.

    Large leaves leave from where backward put them, without being packed first; the others go together.
    """

    def __init__(self, mesh: Mesh, bucket: Bucket, leaves: Sequence[torch.Tensor | None], *, replicas: bool) -> None:
        self._mesh, self._replicas = mesh, bucket.replicas if replicas else ()
        self._owned = torch.empty(bucket.owned, dtype=bucket.reduce_dtype, device=mesh.device)
        (axis,) = bucket.axes
        places = bucket.leaf_parts(self._owned, 1)
        alone = [place for place in bucket.large if bucket.chunks[place] * bucket.ways == bucket.numels[place]]
        self._works = [
            primitives.reduce_scatter(mesh, axis, places[place], self._flat(leaves[place], bucket, place))
            for place in alone
        ]
        # Chosen by the bucket alone, never by the gradients: every rank must make the same exchanges.
        together = tuple(place for place in range(len(leaves)) if place not in alone)
        self._small = [places[place] for place in together]
        if together:
            packed = bucket.only(together).pack([leaves[place] for place in together], bucket.reduce_dtype)
            self._reduced = packed.new_empty(packed.numel() // bucket.ways)
            self._works.append(primitives.reduce_scatter(mesh, axis, self._reduced, packed))

    def _flat(self, leaf: torch.Tensor | None, bucket: Bucket, place: int) -> torch.Tensor:
        """A gradient as it can be sent: itself, in the usual case."""
        if leaf is None:
            return self._owned.new_zeros(bucket.numels[place])
        return (leaf.to_dense() if leaf.is_sparse else leaf).to(bucket.reduce_dtype).reshape(-1)

    def wait(self) -> torch.Tensor:
        """The summed, owned buffer."""
        for work in self._works:
            work.wait()
        if self._small:
            torch.split_with_sizes_copy(self._reduced, [place.numel() for place in self._small], out=self._small)
        for axis in self._replicas:
            primitives.all_reduce(self._mesh, axis, self._owned).wait()
        return self._owned


def owner_index(mesh: Mesh, bucket: Bucket, start: int, stop: int) -> int:
    """This rank's number among the owners that levels ``start`` to ``stop`` tell apart."""
    index = 0
    for level in range(start, stop):
        index = index * bucket.sizes[level] + mesh.coords[bucket.axes[level]]
    return index
