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
    """A leaf-major buffer of level ``stop`` on its way to level ``start``."""

    def __init__(self, mesh: Mesh, bucket: Bucket, buffer: torch.Tensor, start: int, stop: int) -> None:
        self._mesh, self._bucket, self._start, self._stop = mesh, bucket, start, stop
        self._level = stop
        self._buffer = buffer
        self._launch()

    def _launch(self) -> None:
        self._level -= 1
        bucket, inp = self._bucket, self._buffer
        self._buffer = inp.new_empty(inp.numel() * bucket.sizes[self._level])
        self._work = primitives.all_gather(self._mesh, bucket.axes[self._level], self._buffer, inp)

    def wait(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """The gathered, leaf-major buffer (``out``, when given)."""
        self._work.wait()
        while self._level > self._start:
            self._launch()
            self._work.wait()
        return self._bucket.to_leaf_major(self._buffer, self._start, self._stop, out)


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


def owner_index(mesh: Mesh, bucket: Bucket, start: int, stop: int) -> int:
    """This rank's number among the owners that levels ``start`` to ``stop`` tell apart."""
    index = 0
    for level in range(start, stop):
        index = index * bucket.sizes[level] + mesh.coords[bucket.axes[level]]
    return index
