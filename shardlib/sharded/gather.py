"""The gathering of a bucket, along a route of all-gathers.

A buffer in another memory is brought to the device first. What comes first starts at once and runs while the caller computes.
The rest follows when the caller waits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardlib.collectives import primitives
from shardlib.mesh.memories import Transfer
from shardlib.mesh.mesh import Mesh
from shardlib.mesh.transport.activity import naming
from shardlib.plan.exchanges import Exchange


class Gather:
    """A leaf-major buffer that is being gathered.

    Args:
        route: the gathers. Where values are packed, a rank's own values are decoded as the other ranks' are.
        buffer: this rank's buffer at the level at which the route begins, in any memory.
        out: the buffer for the result; None for new memory.
        comes: whether the buffer counts as one in another memory, though it is not (in a trace, which has one memory).

    Attributes:
        passed: level -> the buffer at that level, for the levels that `wait` has reached.
        transfer: the way of a buffer in another memory to the device, until `wait`.
    """

    def __init__(
        self,
        mesh: Mesh,
        route: Sequence[Exchange],
        buffer: torch.Tensor,
        out: torch.Tensor | None = None,
        comes: bool = False,
    ) -> None:
        self._mesh, self._todo = mesh, list(route)
        self._buffer, self._out = buffer, out
        self.passed: dict[int, torch.Tensor] = {}
        self._under_way: Exchange | None = None
        self.transfer: Transfer | None = None
        if comes or buffer.device != mesh.device:
            self._buffer = up = torch.empty_like(buffer, device=mesh.device)
            self.transfer = mesh.transfers.start("up", lambda: up.copy_(buffer, non_blocking=True), buffer)
        else:
            self._launch()

    def _launch(self) -> None:
        """Start the gather of the next level, if there is one. Where several leaves share the bucket it is rank-major, to be
        reordered."""
        self._under_way = None
        if not self._todo:
            return
        self._under_way = exchange = self._todo.pop(0)
        bucket, ways = exchange.bucket, exchange.ways
        out = None if self._todo else self._out
        self._packed: torch.Tensor | None = None
        with naming(bucket.label):
            whole = self._buffer.new_empty(bucket.size(exchange.target)) if out is None else out
            self._gathered = whole if bucket.alone else self._buffer.new_empty(whole.numel())
            if exchange.packing is None:
                gathered = self._gathered.view(ways, -1)
                self._work = primitives.all_gather(self._mesh, exchange.axis, gathered, self._buffer)
            else:
                message = exchange.packing.pack(self._buffer)
                self._packed = message.new_empty((ways, len(message)))
                self._work = primitives.all_gather(self._mesh, exchange.axis, self._packed, message)
        self._sent, self._buffer = self._buffer, whole  # what the exchange reads stays until it has ended

    def _land(self) -> None:
        """Wait for the gather that is under way, decode it, and bring it in leaf-major order."""
        assert self._under_way is not None
        self._work.wait()
        bucket, ways, packing = self._under_way.bucket, self._under_way.ways, self._under_way.packing
        if self._packed is not None and packing is not None:
            for message, row in zip(self._packed, self._gathered.view(ways, -1), strict=True):
                packing.unpack(message, row)
            self._packed = None
        if not bucket.alone:
            bucket.in_leaves(self._gathered.view(ways, -1), self._buffer)
        del self._gathered, self._sent
        self.passed[self._under_way.target] = self._buffer

    def wait(self) -> torch.Tensor:
        """The gathered, leaf-major buffer (``out``, if given), for what the device does from now on."""
        if self.transfer is not None:
            self.transfer.join()
            self.transfer = None
            self._launch()
        while self._under_way is not None:
            self._land()
            self._launch()
        return self._buffer
