"""What is under way between host memory and files."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, wait

import torch

from shardlib.common.clock import timed
from shardlib.sharded.disk.layout import Flat
from shardlib.sharded.disk.pool import Pool


class PendingRead:
    """A buffer that is being read."""

    def __init__(self, pool: Pool, block: torch.Tensor, flat: Flat, pending: Sequence[Future[None]]) -> None:
        self._pool, self._block, self._flat, self._pending = pool, block, flat, pending
        self._held = True

    def result(self) -> torch.Tensor:
        """The buffer, in memory that is lent; waits for it.

        Raises:
            StorageError: it could not be read; the memory is given back.
        """
        try:
            with timed("wait", "disk"):
                wait(self._pending)
            for request in self._pending:
                request.result()
        except BaseException:
            self.cancel()
            raise
        if not self._flat.numel:  # an empty tensor has no address that it could be recognised by
            self.cancel()
            return torch.empty(0, dtype=self._flat.dtype)
        return self._block[: self._flat.bytes].view(self._flat.dtype)

    def cancel(self) -> None:
        """Give back the memory, of the result too. A second call does nothing."""
        wait(self._pending)
        if self._held:
            self._held = False
            self._pool.give(self._block)


class Write:
    """A buffer that is being written, whose memory is given back when the last of its requests is done."""

    def __init__(self, pool: Pool, block: torch.Tensor, requests: int) -> None:
        self._pool, self.block, self._left = pool, block, requests
        self._lock = threading.Lock()

    def done(self) -> None:
        """Count a request that is done, or has failed."""
        with self._lock:
            self._left -= 1
            last = not self._left
        if last:
            self._pool.give(self.block)
