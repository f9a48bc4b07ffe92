"""A bucket on its way towards whole, along a route of gathers.

The first exchange starts at once, and is under way while the caller goes on; the others follow when it is waited for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardlib.collectives import primitives
from shardlib.mesh.mesh import Mesh
from shardlib.plan.exchanges import Exchange


class Gather:
    """A leaf-major buffer that is being gathered.

    Args:
        route: the gathers, one at least; a rank's own values come out of a packing as the others' do.
        buffer: at the level that the route begins at.
        out: is filled, when given.

    Attributes:
        passed: level -> the buffer at that level, of those on the way that `wait` was through.
    """

    def __init__(
        self, mesh: Mesh, route: Sequence[Exchange], buffer: torch.Tensor, out: torch.Tensor | None = None
    ) -> None:
        self._mesh, self._todo = mesh, list(route)
        self._buffer, self._out = buffer, out
        self.passed: dict[int, torch.Tensor] = {}
        self._launch()

    def _launch(self) -> None:
        """Send for the next level; what comes in rank by rank is put leaf by leaf, except where one leaf is alone."""
        self._under_way = exchange = self._todo.pop(0)
        bucket, ways = exchange.bucket, exchange.ways
        out = None if self._todo else self._out
        whole = self._buffer.new_empty(bucket.size(exchange.target)) if out is None else out
        self._gathered = whole if bucket.alone else self._buffer.new_empty(whole.numel())
        self._packed: torch.Tensor | None = None
        if exchange.packing is None:
            self._work = primitives.all_gather(self._mesh, exchange.axis, self._gathered.view(ways, -1), self._buffer)
        else:
            message = exchange.packing.pack(self._buffer)
            self._packed = message.new_empty((ways, len(message)))
            self._work = primitives.all_gather(self._mesh, exchange.axis, self._packed, message)
        self._buffer = whole

    def _land(self) -> None:
        self._work.wait()
        bucket, ways, packing = self._under_way.bucket, self._under_way.ways, self._under_way.packing
        if self._packed is not None and packing is not None:
            for message, row in zip(self._packed, self._gathered.view(ways, -1), strict=True):
                packing.unpack(message, row)
            self._packed = None
        if not bucket.alone:
            places = [place.view(ways, -1) for place in bucket.leaf_segments(self._buffer, self._under_way.target)]
            widths = [place.shape[1] for place in places]
            torch.split_with_sizes_copy(self._gathered.view(ways, -1), widths, dim=1, out=places)
        del self._gathered
        self.passed[self._under_way.target] = self._buffer

    def wait(self) -> torch.Tensor:
        """The gathered, leaf-major buffer (``out``, when given)."""
        self._land()
        while self._todo:
            self._launch()
            self._land()
        return self._buffer
