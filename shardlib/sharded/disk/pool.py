"""Host memory that disks are read into and written from: bounded, reused, aligned to pages."""

from __future__ import annotations

import threading

import torch

from shardlib.common.pages import pages, settle
from shardlib.errors import StorageError


class Pool:
    """Blocks of host memory, of ``limit`` bytes together at most.

    A block is *lent* until it is given back, or *sent*: then it will come back by itself. `take` waits for blocks that were
    sent, which is what holds a writer back that is quicker than its disk. Blocks are used again once there are as many as the
    limit allows, so that what is held does not depend on how quick the disk is.

    Args:
        limit: bytes of all blocks.
        pinned: whether an accelerator copies from and to the blocks beside other work.
    """

    def __init__(self, limit: int, pinned: bool) -> None:
        self._limit, self._pinned = limit, pinned
        self._changed = threading.Condition()
        self._lent: dict[int, torch.Tensor] = {}
        self._sent: dict[int, torch.Tensor] = {}
        self._idle: list[torch.Tensor] = []

    def take(self, size: int) -> torch.Tensor:
        """A block of ``size`` bytes, lent. Waits until it fits.

        Raises:
            StorageError: nothing is on its way back.
        """
        with self._changed:
            while not self._fits(size):
                if not self._sent:
                    held = sum(block.numel() for block in self._lent.values())
                    raise StorageError(
                        f"{size:,} bytes of host memory are needed to read or write a buffer, and {held:,} of "
                        f"{self._limit:,} are lent: write or release what was fetched before, or give the store more memory"
                    )
                self._changed.wait()
            return self._new(size)

    def room(self, sizes: list[int]) -> bool:
        """Whether blocks of these sizes can be taken now, without waiting."""
        with self._changed:
            return self._fits(sum(sizes))

    def lent(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The lent block that a tensor begins at; None if it lies elsewhere."""
        with self._changed:
            return self._lent.get(tensor.data_ptr())

    def send(self, block: torch.Tensor) -> None:
        """Announce that a lent block will be given back by another thread."""
        with self._changed:
            self._sent[block.data_ptr()] = self._lent.pop(block.data_ptr())

    def give(self, block: torch.Tensor) -> None:
        """Give back a block that was lent or sent."""
        with self._changed:
            self._idle.append((self._lent if block.data_ptr() in self._lent else self._sent).pop(block.data_ptr()))
            self._changed.notify_all()

    def give_back(self) -> None:
        """Free the blocks that are neither lent nor sent."""
        with self._changed:
            self._idle = []

    def _fits(self, size: int) -> bool:
        held = sum(block.numel() for blocks in (self._lent, self._sent) for block in blocks.values())
        return held + size <= self._limit

    def _new(self, size: int) -> torch.Tensor:
        known = (self._lent.values(), self._sent.values(), self._idle)
        free = self._limit - sum(block.numel() for blocks in known for block in blocks)
        block = None if size <= free else next((idle for idle in self._idle if idle.numel() == size), None)
        if block is not None:
            self._idle = [idle for idle in self._idle if idle is not block]
        else:
            while self._idle and size > free:
                settle(self._idle[0])  # which came back when its copies had ended
                free += self._idle.pop(0).numel()
            block = pages(size, self._pinned)
        self._lent[block.data_ptr()] = block
        return block
