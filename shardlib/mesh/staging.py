"""Pinned host memory through which data pass on their way to the device: bounded, and reused from step to step."""

from __future__ import annotations

import torch

from shardlib.common.pages import pages
from shardlib.mesh.transfers import Transfer

_ALIGNMENT = 64  # bytes


class Slot:
    """Memory for the data of one group of transfers at a time.

    Args:
        pinned: whether the device has a memory of its own.
    """

    def __init__(self, pinned: bool) -> None:
        self._memory, self._pinned = torch.empty(0, dtype=torch.uint8), pinned
        self._used = 0
        self._transfers: list[Transfer] = []

    def empty(self, size: int) -> Slot:
        """This slot with ``size`` bytes to take, once what was taken before has been transferred."""
        for transfer in self._transfers:
            transfer.wait()
        self._transfers, self._used = [], 0
        if self._memory.numel() < size:
            self._memory = pages(size, self._pinned)
        return self

    def give_back(self) -> None:
        """Free the memory, of which nothing is on its way."""
        self.empty(0)._memory = torch.empty(0, dtype=torch.uint8)

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor of the slot's memory, with no values yet."""
        start, self._used = self._used, self._used + taken(numel, dtype)
        return self._memory[start : start + numel * dtype.itemsize].view(dtype)

    def sent(self, transfer: Transfer) -> None:
        """Keep what was taken until ``transfer`` is complete."""
        self._transfers.append(transfer)


def taken(numel: int, dtype: torch.dtype) -> int:
    """Bytes of a slot that a tensor takes."""
    return -(-numel * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
