"""Host memory that a rank keeps from one step to the next, and gives back when its states move away."""

from __future__ import annotations

import weakref
from typing import Protocol

import torch

from shardlib.mesh.transfers import Transfers


class MemoryKeeper(Protocol):
    """What keeps host memory for its next use."""

    def give_back(self) -> None:
        """Free the memory; the next use makes it anew. Nothing uses it now."""
        ...


class KeptMemory:
    """The memory that one rank's train steps, and what they use, keep between steps."""

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers
        self._keepers: weakref.WeakSet[MemoryKeeper] = weakref.WeakSet()

    def add(self, keeper: MemoryKeeper) -> None:
        """Let `give_back` ask a further one, as long as it is there."""
        self._keepers.add(keeper)

    def give_back(self) -> None:
        """Free all of it. For between two steps."""
        if self._transfers.apart:
            torch.accelerator.synchronize()  # copies of the last step may be under way
        for keeper in list(self._keepers):
            keeper.give_back()
