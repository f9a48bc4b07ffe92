"""Inputs of blocks in host memory.

A tensor goes down while its block computes, and comes back up while the block after it is recomputed, on two streams of their
own. The block's successor waits for the way down before it starts: then the tensor's memory is free, at a point that does not
depend on how fast links are.
"""

from __future__ import annotations

from typing import Protocol

import torch

from shardlib.common._compat import version_of
from shardlib.common.pages import pages
from shardlib.execute.activations.statistics import flattened
from shardlib.execute.saving import Saved
from shardlib.mesh.mesh import Mesh
from shardlib.mesh.transfers import Transfer, Transfers
from shardlib.plan.recompute import Recompute


class HostLink(Protocol):
    """The way between a device's memory and the host's."""

    def buffer(self, size: int) -> torch.Tensor:
        """``size`` bytes of host memory."""
        ...

    def copy(self, way: str, target: torch.Tensor, source: torch.Tensor) -> Transfer:
        """Start to copy "down" to the host or "up" from it."""
        ...


class Pinned:
    """The link of a device with a memory of its own."""

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers

    def buffer(self, size: int) -> torch.Tensor:
        return pages(size, pinned=True)

    def copy(self, way: str, target: torch.Tensor, source: torch.Tensor) -> Transfer:
        return self._transfers.start(way, lambda: target.copy_(source, non_blocking=True))


class FakeHostLink:
    """A link for planning: tensors have no values, and host memory is that of the meta device."""

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers

    def buffer(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device="meta")

    def copy(self, way: str, target: torch.Tensor, source: torch.Tensor) -> Transfer:
        return self._transfers.start(way, lambda: None)


class HostBuffers:
    """Buffers in host memory, which later micro-batches and steps use again.

    Attributes:
        down: bytes copied to the host.
        up: bytes copied from it.
        held: bytes of all buffers.
    """

    def __init__(self, link: HostLink) -> None:
        self.link = link
        self.down = self.up = self.held = 0
        self._free: list[torch.Tensor] = []
        self._leaving: list[InHost] = []

    def put(self, tensor: torch.Tensor) -> InHost:
        """Start to move a tensor to the host."""
        self._leaving.append(InHost(self, tensor))
        return self._leaving[-1]

    def settle(self) -> None:
        """Free the device's memory of what was put, for operations that follow on the current stream."""
        for kept in self._leaving:
            kept.leave()
        self._leaving.clear()

    def take(self, size: int) -> torch.Tensor:
        """The smallest free buffer of at least ``size`` bytes. If there is none, a new one takes the largest one's place."""
        large = [buffer for buffer in self._free if len(buffer) >= size]
        if large:
            return self._pop(min(large, key=len))
        if self._free:
            self.held -= len(self._pop(max(self._free, key=len)))
        self.held += size
        return self.link.buffer(size)

    def _pop(self, buffer: torch.Tensor) -> torch.Tensor:
        self._free = [other for other in self._free if other is not buffer]
        return buffer

    def give(self, buffer: torch.Tensor) -> None:
        self._free.append(buffer)

    def give_back(self) -> None:
        """Free the buffers that hold nothing."""
        self.held -= sum(map(len, self._free))
        self._free = []


class InHost:
    """A tensor that was moved to host memory, and may be brought back, several times."""

    moves = True

    def __init__(self, memory: HostBuffers, tensor: torch.Tensor) -> None:
        self._original: Saved | None = Saved(tensor, version_of(tensor))
        self._changed: RuntimeError | None = None
        flat, self._layout = flattened(tensor)
        self._memory, self._link = memory, memory.link
        self._numel, self._dtype, self._device, self._bytes = len(flat), flat.dtype, flat.device, flat.nbytes
        self._buffer = memory.take(self._bytes)
        self._leaving: torch.Tensor | None = flat
        self._gone = self._link.copy("down", self._host(), flat)
        memory.down += self._bytes
        self._here: torch.Tensor | None = None
        self._coming = Transfer()

    def _host(self) -> torch.Tensor:
        return self._buffer[: self._bytes].view(self._dtype)

    def leave(self) -> None:
        """Free the device's memory."""
        if self._original is not None:
            self._gone.join()
            if version_of(self._original.tensor) != self._original.version:
                self._changed = self._original.changed()  # the copy may have been taken before the change, or after it
            self._original = self._leaving = None

    def fetch(self) -> None:
        """Start to bring the tensor back."""
        if self._here is None:
            self.leave()
            self._here = torch.empty(self._numel, dtype=self._dtype, device=self._device)
            self._coming = self._link.copy("up", self._here, self._host())
            self._memory.up += self._bytes

    def arrive(self) -> torch.Tensor:
        """The tensor, on the device."""
        self.fetch()
        if self._changed is not None:
            raise self._changed
        assert self._here is not None
        self._wait()
        return self._here.as_strided(*self._layout)

    def _wait(self) -> None:
        """Let what follows on the current stream use the memory that the tensor is copied to."""
        self._coming.join()

    def release(self) -> None:
        """Let go of the tensor that was brought back."""
        if self._here is not None:
            self._wait()  # also for other uses of the memory
            self._here = None

    def spend(self) -> None:
        """Let go of the tensor that was brought back, for good. Its host memory is for the next step."""
        self.release()

    def free(self) -> None:
        """Give the host memory back; the tensor is not needed any more."""
        self.leave()
        self.release()
        self._memory.give(self._buffer)


def host_memory(how: Recompute | None, mesh: Mesh) -> HostBuffers | None:
    """Host memory for inputs of blocks; None if they stay on the device, which on the CPU is the host."""
    if how is None or not how.host or not (mesh.abstract or mesh.transfers.apart):
        return None
    memory = HostBuffers(FakeHostLink(mesh.transfers) if mesh.abstract else Pinned(mesh.transfers))
    mesh.kept.add(memory)
    return memory
