"""The memories that a buffer of the training state may lie in, and the copies between the device's and the host's."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from shardlib.common.devices import pages, pins
from shardlib.common.disk import whole_blocks
from shardlib.common.environment import timed

# Copies between the device's memory and the host's, on streams of their own, while the device computes.


class Transfer:
    """A copy that may still be under way.

    Args:
        event: comes when the copy is complete; None for a copy that is.
        source: what is copied, whose memory is kept until then.
    """

    def __init__(self, event: torch.Event | None = None, source: torch.Tensor | None = None) -> None:
        self._event, self._source = event, source

    @property
    def done(self) -> bool:
        event = self._event  # another thread may be waiting
        return event is None or event.query()

    def wait(self) -> None:
        """Return once the copy is complete, so that the host may read or write its memory."""
        if (event := self._event) is not None:
            with timed("wait", "copies"):
                event.synchronize()
        self._event = self._source = None

    def join(self) -> None:
        """Make what the device is given from now on, on the current stream, wait for the copy. Returns at once."""
        if (event := self._event) is not None:
            torch.accelerator.current_stream(event.device).wait_event(event)


class Transfers:
    """The copies of one rank. A copy comes after what the current stream was given before it.

    Where the device's memory is the host's, a copy is complete when the call returns. In a trace it takes as long as it may.

    Args:
        abstract: whether there are no ranks, so that nothing is copied.

    Attributes:
        apart: whether the device has a memory of its own.
    """

    def __init__(self, device: torch.device, abstract: bool = False) -> None:
        self._device = device
        self.apart: bool = pins(device) and not abstract
        self._abstract = abstract
        self._streams: dict[str, torch.Stream] = {}
        self._lines: dict[str, _Line] = {}

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> Transfer:
        """Copy ``source`` to ``target``, one of which is in pinned memory and the other on the device."""
        return self.start(
            "up" if source.device.type == "cpu" else "down", lambda: target.copy_(source, non_blocking=True), source
        )

    def start(self, way: str, copies: Callable[[], object], source: torch.Tensor | None = None) -> Transfer:
        """Start ``copies()``, which all go one ``way``: "up" to the device, or "down" to the host."""
        with timed("offload", way):
            return self._start(way, copies, source)

    def _start(self, way: str, copies: Callable[[], object], source: torch.Tensor | None) -> Transfer:
        if self._abstract:
            copies()
            return _Slow(self._lines.setdefault(way, _Line()), source)
        if not self.apart:
            copies()
            return Transfer()
        if way not in self._streams:
            self._streams[way] = torch.Stream(device=self._device)
        stream = self._streams[way]
        stream.wait_stream(torch.accelerator.current_stream(self._device))
        with stream:
            copies()
            event = torch.Event(self._device)
            event.record(stream)
        return Transfer(event, source)


@dataclass
class _Line:
    """The copies of a trace that go one way: how many have begun, and how many of the first have ended."""

    begun: int = 0
    ended: int = 0


class _Slow(Transfer):
    """A copy of a trace. It takes until somebody waits for it, or for a later one that goes the same way."""

    def __init__(self, line: _Line, source: torch.Tensor | None) -> None:
        super().__init__(source=source)
        line.begun += 1
        self._line, self._number = line, line.begun

    @property
    def done(self) -> bool:
        return self._number <= self._line.ended

    def wait(self) -> None:
        self.join()
        super().wait()

    def join(self) -> None:
        self._line.ended = max(self._line.ended, self._number)


# Pinned host memory through which data pass on their way to the device: bounded, and reused from step to step.


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


# The memories that a buffer of the training state may lie in. A further one is a class and an entry of `MEMORIES`.


DIRECTIONS = ("down", "up")  # from the device, to the device
WAYS = (*DIRECTIONS, "read", "written")  # and what a rank's disks do
AHEAD = 3  # groups of buffers that are read from disk ahead of the one in use
WRITING = 2  # groups that are on their way to disk


class DeviceMemory:
    """A memory of a rank: that of the device that it computes on.

    Attributes:
        works: the memory in which buffers of this one are worked on.
        rests: whether that is another one: buffers are brought there, a few at a time, and taken back.
        slots: copies of a buffer that this memory has room for.
    """

    works: str = "device"
    rests: bool = False
    slots: int = 1

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A flat buffer of zeros in this memory, for a rank that computes on ``device``."""
        return torch.zeros(numel, dtype=dtype, device=device)

    def device(self, device: torch.device) -> torch.device:
        """The device by which torch calls the memory where a rank that computes on ``device`` works on these buffers."""
        return device

    def held(self, size: int) -> int:
        """Bytes that a buffer of ``size`` bytes takes here."""
        return size


class HostMemory(DeviceMemory):
    """The host's memory, pinned where the device has a memory of its own. Elsewhere both are one memory."""

    works = "host"

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if pins(device):
            return pages(numel * dtype.itemsize, pinned=True).view(dtype)
        return super().zeros(numel, dtype, device)

    def device(self, device: torch.device) -> torch.device:
        return torch.device("cpu") if pins(device) else device


class Disk(HostMemory):
    """Files, whose buffers are worked on in the host's memory. A buffer takes two slots of whole blocks."""

    rests = True
    slots = 2

    def held(self, size: int) -> int:
        return self.slots * whole_blocks(size)


MEMORIES: Mapping[str, DeviceMemory] = {"device": DeviceMemory(), "host": HostMemory(), "disk": Disk()}


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
