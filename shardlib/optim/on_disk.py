"""What stands for tensors that lie on disk: `OnDisk`; and writes to them in place, which can be taken back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from shardlib.mesh.memories import MEMORIES
from shardlib.optim.base import Packed
from shardlib.plan.plan import Plan
from shardlib.sharded.disk import Store, TieredBuffers
from shardlib.sharded.params_on_disk import params_rest
from shardlib.sharded.tree import Sharded
from shardlib.tree import Tree, leaves_of, tree_map


class OnDisk(Packed):
    """A tensor of a train state, or a bucket of parameters, that lies on disk. Checkpoints read it and write it whole.

    Args:
        files: where it lies.
        version: the number of the states that it belongs to.
    """

    files: TieredBuffers
    name: str
    shape: tuple[int, ...]

    rounds = False

    def __init__(
        self, files: TieredBuffers, version: int, name: str, shape: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        self.files, self._version, self.name, self.shape, self._dtype = files, version, name, shape, dtype

    @property
    def block(self) -> int:
        return max(1, self.like.numel())

    @property
    def store(self) -> Store:
        """The files, for reading and writing.

        Raises:
            DonatedStateError: a later state has been written over it.
        """
        self.files.require(self._version, self.name)
        return self.files.store

    def renewed(self) -> OnDisk:
        """The same tensor, of the states that the files hold now."""
        return OnDisk(self.files, self.files.version, self.name, self.shape, self._dtype)

    @property
    def like(self) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self._dtype, device="meta")

    def part(self, first: int, stop: int) -> torch.Tensor:
        self.files.require(self._version, self.name)
        return self.files.get(self.name)[first:stop]

    def pack(self, values: torch.Tensor, first: int = 0) -> None:
        self.files.require(self._version, self.name)
        try:
            self.files.put(self.name, values.reshape(-1))  # all of it: a part is a block, and this is one
            self.files.flush()  # what fails is this call's error
        except BaseException:
            self.files.roll_back()  # for the next attempt
            raise

    def __repr__(self) -> str:
        return f"OnDisk({self.name}, {list(self.shape)}, {self._dtype})"


def buckets_on_disk(params: Sharded) -> dict[str, OnDisk]:
    """Bucket name -> what stands for it, of parameters on disk."""
    if (buffers := params.on_disk) is None:
        return {}
    return {
        bucket.name: OnDisk(
            buffers.files, buffers.version, bucket.name, (bucket.size(bucket.param_level),), bucket.dtype
        )
        for bucket in params.buckets
    }


class PendingChange(Packed):
    """A tensor on disk with a change that nobody has written yet: it is made at each read.

    Attributes:
        leaf: what lies on disk.
    """

    leaf: OnDisk

    rounds = False

    def __init__(self, leaf: OnDisk, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.leaf, self._change = leaf, change

    @property
    def block(self) -> int:
        return self.leaf.block

    @property
    def like(self) -> torch.Tensor:
        return self.leaf.like

    def part(self, first: int, stop: int) -> torch.Tensor:
        return self._change(self.leaf.unpacked()).reshape(-1)[first:stop]

    def pack(self, values: torch.Tensor, first: int = 0) -> None:
        self.leaf.pack(values, first)


def write_changes(tree: Tree) -> bool:
    """Write what is `PendingChange` in a tree to its files; returns whether there was something."""
    leaves = [leaf for leaf in leaves_of(tree) if isinstance(leaf, PendingChange)]
    for leaf in leaves:
        leaf.pack(leaf.unpacked())
    return bool(leaves)


def without_changes(tree: Tree) -> Tree:
    """A tree with what lies on disk in place of what is `PendingChange`."""
    return tree_map(lambda leaf: leaf.leaf if isinstance(leaf, PendingChange) else leaf, tree)


def rests(plan: Plan) -> bool:
    """Whether states of a rank lie on disk between updates."""
    return any(MEMORIES[bucket.memory.optimizer].rests for bucket in plan.everywhere.trained)


def in_files(plan: Plan) -> bool:
    """Whether something of a train state lies on disk between updates: states or parameters."""
    return rests(plan) or params_rest(plan)


class InPlace:
    """Writes to the files of some trees' leaves, which are taken back where one fails.

    Args:
        trees: leaves of other kinds are left out.
    """

    def __init__(self, trees: Iterable[Any]) -> None:
        found = [leaf.files for tree in trees for leaf in leaves_of(tree) if isinstance(leaf, OnDisk)]
        self.files: list[TieredBuffers] = list({id(files): files for files in found}.values())
        self._begun: list[TieredBuffers] = []

    def begin(self) -> None:
        """Keep what was written before."""
        for files in self.files:
            files.settle()
            self._begun.append(files)

    def take_back(self) -> None:
        """Make everything as it was at `begin`."""
        for files in self._begun:
            files.roll_back()
