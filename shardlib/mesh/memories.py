"""The memories that a buffer of the training state may lie in. A further one is a class and an entry of `MEMORIES`."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping
from typing import Protocol

import torch

from shardlib.common.devices import pins
from shardlib.common.disk import whole_blocks
from shardlib.common.pages import pages
from shardlib.mesh.transfers import Transfers

DIRECTIONS = ("down", "up")  # from the device, to the device
WAYS = (*DIRECTIONS, "read", "written")  # and what a rank's disks do
AHEAD = 3  # groups of buffers that are read from disk ahead of the one in use
WRITING = 2  # groups that are on their way to disk


class MemoryKind(Protocol):
    """A memory of a rank.

    Attributes:
        works: the memory in which buffers of this one are worked on.
        rests: whether that is another one: buffers are brought there, a few at a time, and taken back.
        slots: copies of a buffer that this memory has room for.
    """

    works: str
    rests: bool
    slots: int

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A flat buffer of zeros in this memory, for a rank that computes on ``device``."""
        ...

    def device(self, device: torch.device) -> torch.device:
        """The device by which torch calls the memory where a rank that computes on ``device`` works on these buffers."""
        ...

    def held(self, size: int) -> int:
        """Bytes that a buffer of ``size`` bytes takes here."""
        ...


class DeviceMemory:
    """The memory of the device that a rank computes on."""

    works, rests, slots = "device", False, 1

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.zeros(numel, dtype=dtype, device=device)

    def device(self, device: torch.device) -> torch.device:
        return device

    def held(self, size: int) -> int:
        return size


class HostMemory:
    """The host's memory, pinned where the device has a memory of its own. Elsewhere both are one memory."""

    works, rests, slots = "host", False, 1

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if pins(device):
            return pages(numel * dtype.itemsize, pinned=True).view(dtype)
        return torch.zeros(numel, dtype=dtype, device=device)

    def device(self, device: torch.device) -> torch.device:
        return torch.device("cpu") if pins(device) else device

    def held(self, size: int) -> int:
        return size


class Disk(HostMemory):
    """Files, whose buffers are worked on in the host's memory. A buffer takes two slots of whole blocks."""

    rests, slots = True, 2

    def held(self, size: int) -> int:
        return self.slots * whole_blocks(size)


MEMORIES: Mapping[str, MemoryKind] = {"device": DeviceMemory(), "host": HostMemory(), "disk": Disk()}


def window(groups: Collection[int]) -> int:
    """Bytes of host memory that groups of buffers on disk pass through, from the bytes of each: what is read ahead, in use
    and being written, at most."""
    return min(sum(groups), (AHEAD + 1 + WRITING) * max(groups, default=0))


def scratch_window(groups: Collection[int], largest: int) -> int:
    """Bytes of host memory that groups of scratch buffers pass through: read ahead and in use, or before that on their way
    and being written. The ``largest`` buffer fits beside a summand of it."""
    return max(2 * largest, min(sum(groups), (AHEAD + 1) * max(groups, default=0)))


# Host memory that a rank keeps from one step to the next, and gives back when its states move away.


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
