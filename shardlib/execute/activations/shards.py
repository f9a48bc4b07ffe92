"""Inputs of blocks divided over an axis (ZeRO-R's P_a: arXiv 1910.02054, section 6.1).

Where tensor slicing has every rank compute from the same activations, every rank would keep the same inputs of blocks. Each
keeps its share instead, and the ranks gather an input when its block is recomputed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from shardlib.collectives import primitives
from shardlib.errors import HandleError
from shardlib.execute.activations.keeper import ActivationStore, StoredActivation
from shardlib.execute.activations.statistics import flattened
from shardlib.mesh.mesh import Mesh
from shardlib.mesh.transport import Work
from shardlib.mesh.transport.activity import naming
from shardlib.plan.recompute import Recompute
from shardlib.sharded.checksum import checksum


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
                f"remat(store='sharded') divides the inputs of blocks over axis {self._axis!r}, whose ranks hold different "
                f"values of one, of shape {tuple(tensor.shape)} and {tensor.dtype}. Let blocks begin where activations are "
                "whole on every rank (before a column layer or after a row layer, not between the two), or keep inputs by "
                "store='host' or store='device'"
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
