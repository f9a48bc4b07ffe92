"""Moving buckets between levels: gathers towards whole, reductions towards what one rank owns.

Each starts at once and is finished by `wait`. Over several axes the first exchange is under way while the caller
goes on, and the others follow when it is waited for.
"""

from __future__ import annotations

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
        """Send for the next level; what comes in rank by rank is put leaf by leaf, except where one leaf is alone."""
        self._level -= 1
        bucket, level = self._bucket, self._level
        axis, ways = bucket.axes[level], bucket.sizes[level]
        out = self._out if level == self._start else None
        whole = self._buffer.new_empty(bucket.size(level)) if out is None else out
        self._gathered = whole if bucket.alone else self._buffer.new_empty(whole.numel())
        self._work = primitives.all_gather(self._mesh, axis, self._gathered.view(ways, -1), self._buffer)
        self._buffer = whole

    def _land(self) -> None:
        self._work.wait()
        bucket, level = self._bucket, self._level
        if not bucket.alone:
            ways = bucket.sizes[level]
            places = [place.view(ways, -1) for place in bucket.leaf_parts(self._buffer, level)]
            widths = [place.shape[1] for place in places]
            torch.split_with_sizes_copy(self._gathered.view(ways, -1), widths, dim=1, out=places)
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
        within: leave each result in this rank's part of this buffer, which may be the one that comes in.
    """

    def __init__(
        self,
        mesh: Mesh,
        bucket: Bucket,
        buffer: torch.Tensor,
        start: int,
        stop: int,
        *,
        replicas: bool,
        within: torch.Tensor | None = None,
    ) -> None:
        self._mesh, self._bucket, self._within = mesh, bucket, within
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
        if self._within is None:
            self._buffer = inp.new_empty(inp.numel() // self._mesh.shape[axis])
        else:
            self._buffer = self._within = self._within.view(self._mesh.shape[axis], -1)[self._mesh.coords[axis]]
        self._work = primitives.reduce_scatter(self._mesh, axis, self._buffer, inp)

    def wait(self) -> torch.Tensor:
        """The summed buffer at level ``stop``."""
        while self._work is not None:
            self._work.wait()
            self._launch()
        return self._buffer


def owner_index(mesh: Mesh, bucket: Bucket, start: int, stop: int) -> int:
    """This rank's number among the owners that levels ``start`` to ``stop`` tell apart."""
    index = 0
    for level in range(start, stop):
        index = index * bucket.sizes[level] + mesh.coords[bucket.axes[level]]
    return index
