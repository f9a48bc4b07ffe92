"""Where inputs of checkpointed blocks are between forward and backward: in host memory, or divided over an axis."""

from __future__ import annotations

from collections.abc import Callable

import torch

from shardlib.collectives import primitives
from shardlib.common._compat import version_of
from shardlib.common.devices import pages
from shardlib.errors import HandleError
from shardlib.execute.activation_offload import ActivationStore, StoredActivation
from shardlib.execute.recompute import flattened
from shardlib.execute.saving import Saved
from shardlib.mesh.memories import Transfer, Transfers
from shardlib.mesh.mesh import Mesh
from shardlib.mesh.transport import Work
from shardlib.mesh.transport.activity import naming
from shardlib.plan.recompute import Recompute
from shardlib.sharded.checksum import checksum

# Inputs of blocks in host memory.
# A tensor goes down while its block computes, and comes back up while the block after it is recomputed, on two streams of
# their own. The block's successor waits for the way down before it starts: then the tensor's memory is free, at a point
# that does not depend on how fast links are.


class HostLink:
    """The way between a device's memory and the host's. In a plan tensors have no values, and the host's
    memory is that of the meta device."""

    def __init__(self, transfers: Transfers, fake: bool) -> None:
        self._transfers, self._fake = transfers, fake

    def buffer(self, size: int) -> torch.Tensor:
        """``size`` bytes of host memory."""
        return torch.empty(size, dtype=torch.uint8, device="meta") if self._fake else pages(size, pinned=True)

    def copy(self, way: str, target: torch.Tensor, source: torch.Tensor) -> Transfer:
        """Start to copy "down" to the host or "up" from it."""
        return self._transfers.start(way, lambda: None if self._fake else target.copy_(source, non_blocking=True))


class HostBuffers:
    """Buffers in host memory, which later micro-batches and steps use again.

    Attributes:
        down: bytes copied to the host.
        up: bytes copied from it.
        held: bytes of all buffers.
    """

    held: int

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
    memory = HostBuffers(HostLink(mesh.transfers, mesh.abstract))
    mesh.kept.add(memory)
    return memory


# Inputs of blocks divided over an axis (ZeRO-R's P_a: arXiv 1910.02054, section 6.1).
# Where tensor slicing has every rank compute from the same activations, every rank would keep the same inputs of blocks.
# Each keeps its share instead, and the ranks gather an input when its block is recomputed.


def store_of(
    how: Recompute | None, mesh: Mesh, host: ActivationStore | None, first: Callable[[], bool]
) -> ActivationStore | None:
    """The store that a plan names; None if inputs of blocks stay where they are.

    Args:
        host: the store in host memory, if the plan names it and the mesh has one.
        first: whether this is the first micro-batch, in which ranks compare what they divide.
    """
    if how is None or how.axis is None:
        return host
    return ShardedStore(mesh, how.axis, host or Here(), lambda: first() and not mesh.abstract)


class Here:
    """A store that leaves tensors where they are."""

    def put(self, tensor: torch.Tensor) -> _ShardedEntry:
        return _ShardedEntry(tensor.detach())

    def settle(self) -> None: ...


class _ShardedEntry:
    moves = False

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor: torch.Tensor | None = tensor

    def fetch(self) -> None: ...

    def arrive(self) -> torch.Tensor:
        assert self._tensor is not None
        return self._tensor

    def release(self) -> None: ...

    def spend(self) -> None:
        self._tensor = None

    def free(self) -> None:
        self.spend()


class ShardedStore:
    """A store that divides tensors over an axis.

    Args:
        inner: where this rank's shares are kept.
        checks: whether to compare what the ranks put, before each keeps a share of it.
    """

    def __init__(self, mesh: Mesh, axis: str, inner: ActivationStore, checks: Callable[[], bool]) -> None:
        self._mesh, self._axis, self._inner, self._checks = mesh, axis, inner, checks

    def put(self, tensor: torch.Tensor) -> StoredActivation:
        if self._checks():
            self._require_alike(tensor)
        return _Share(self._mesh, self._axis, tensor, self._inner)

    def settle(self) -> None:
        self._inner.settle()

    def _require_alike(self, tensor: torch.Tensor) -> None:
        sums = primitives.all_gather_object(self._mesh, [self._axis], checksum(tensor))
        if len(set(sums)) > 1:
            raise HandleError(
                f"remat(store='sharded'): a block's inputs {tuple(tensor.shape)} differ along axis {self._axis!r}. "
                "Begin no block between a column and a row layer, or use store='host'"
            )


class _Share:
    """This rank's share of a tensor."""

    moves = True

    def __init__(self, mesh: Mesh, axis: str, tensor: torch.Tensor, inner: ActivationStore) -> None:
        self._mesh, self._axis = mesh, axis
        flat, self._layout = flattened(tensor)
        self._size, ways = len(flat), mesh.shape[axis]
        width = -(-self._size // ways)
        mine = flat[mesh.coords[axis] * width :][:width]
        share = mine.clone() if len(mine) == width else torch.cat([mine, mine.new_zeros(width - len(mine))])
        self._share = inner.put(share)
        self._whole: torch.Tensor | None = None
        self._gathering = Work()

    def fetch(self) -> None:
        self._share.fetch()
        if not self._share.moves:
            self._gather()

    def _gather(self) -> None:
        """Start to gather the shares, which are on the device."""
        if self._whole is None:
            share = self._share.arrive()
            self._whole = share.new_empty(len(share) * self._mesh.shape[self._axis])
            with naming("inputs of blocks"), self._mesh.traffic.by_the_loss():
                self._gathering = primitives.all_gather(self._mesh, self._axis, self._whole, share)

    def arrive(self) -> torch.Tensor:
        self._gather()
        assert self._whole is not None
        self._gathering.wait()
        self._share.release()
        return self._whole[: self._size].as_strided(*self._layout)

    def release(self) -> None:
        self._gathering.wait()  # the memory must not be used for anything else before it has been written to
        self._share.release()
        self._whole = None

    def spend(self) -> None:
        self.release()
        self._share.spend()

    def free(self) -> None:
        self.release()
        self._share.free()
