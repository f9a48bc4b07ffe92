"""What stands for tensors that lie on disk: `OnDisk` for those of a train state, `BucketOnDisk` for parameters; and writes
to them in place, which can be taken back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from shardlib.collectives.attempts import attempted, error_of
from shardlib.errors import DonatedStateError
from shardlib.mesh.memories import MEMORIES
from shardlib.mesh.mesh import Mesh
from shardlib.optim.base import Packed
from shardlib.plan.buckets import Bucket
from shardlib.plan.plan import Plan
from shardlib.sharded.disk import Flat, Store
from shardlib.sharded.on_disk import BuffersOnDisk, params_rest
from shardlib.tree import Tree, leaves_of, tree_map


class Committing(Protocol):
    """Files whose writes can be taken back."""

    def commit(self) -> None:
        """Make what was written what `roll_back` goes back to."""
        ...

    def roll_back(self) -> None:
        """Take back what was written since the last commit, and errors with it."""
        ...


class StateFiles(Committing, Protocol):
    """The files of a rank's states.

    Attributes:
        version: the number of the states that the files hold; leaves of others are refused.
    """

    store: Store
    version: int


class OnDisk(Packed):
    """A tensor of a train state that lies on disk between updates. Checkpoints read it and write it whole.

    Args:
        files: where it lies.
        version: the number of the states that it belongs to.
    """

    rounds = False

    def __init__(self, files: StateFiles, version: int, name: str, shape: torch.Size, flat: Flat) -> None:
        self.files, self._version, self.name, self.shape, self._flat = files, version, name, shape, flat

    @property
    def block(self) -> int:
        return max(1, self._flat.numel)

    @property
    def store(self) -> Store:
        """The files, for reading and writing.

        Raises:
            DonatedStateError: a later state has been written over it.
        """
        if self._version != self.files.version:
            raise DonatedStateError(
                f"{self.name} lay on disk, and a later state has been written there: states on disk are there once, and "
                "copies of a state share them. Go on with the state that the last step (or replace_params) returned; to "
                "keep one, save a checkpoint of it"
            )
        return self.files.store

    def renewed(self) -> OnDisk:
        """The same tensor, of the states that the files hold now."""
        return OnDisk(self.files, self.files.version, self.name, self.shape, self._flat)

    @property
    def like(self) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self._flat.dtype, device="meta")

    def part(self, first: int, stop: int) -> torch.Tensor:
        lent = self.store.fetch(self.name).result()
        try:
            return lent[first:stop].clone()
        finally:
            self.store.release(lent)

    def pack(self, values: torch.Tensor, first: int = 0) -> None:
        self.store.write(self.name, values.reshape(-1))  # all of it: a part is a block, and this is one
        self.store.flush()  # what fails is this call's error

    def __repr__(self) -> str:
        return f"OnDisk({self.name}, {list(self.shape)}, {self._flat.dtype})"


class PendingChange(Packed):
    """A tensor on disk with a change that nobody has written yet: it is made at each read.

    Attributes:
        leaf: what lies on disk.
    """

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


def follow(tree: Tree) -> bool:
    """Write what is `PendingChange` in a tree to its files; returns whether there was something."""
    leaves = [leaf for leaf in leaves_of(tree) if isinstance(leaf, PendingChange)]
    for leaf in leaves:
        leaf.pack(leaf.unpacked())
    return bool(leaves)


def followed(tree: Tree) -> Tree:
    """A tree with what lies on disk in place of what is `PendingChange`."""
    return tree_map(lambda leaf: leaf.leaf if isinstance(leaf, PendingChange) else leaf, tree)


class BucketOnDisk(Packed):
    """A bucket of parameters on disk. Checkpoints and moves read it and write it whole."""

    rounds = False

    def __init__(self, buffers: BuffersOnDisk, bucket: Bucket) -> None:
        self._buffers, self._bucket = buffers, bucket

    @property
    def block(self) -> int:
        return max(1, self.like.numel())

    @property
    def files(self) -> Committing:
        """Where it lies."""
        return self._buffers.files

    @property
    def like(self) -> torch.Tensor:
        return torch.empty(self._bucket.size(self._bucket.param_level), dtype=self._bucket.dtype, device="meta")

    def part(self, first: int, stop: int) -> torch.Tensor:
        return self._buffers[self._bucket.name][first:stop]

    def pack(self, values: torch.Tensor, first: int = 0) -> None:
        files = self._buffers.files
        try:
            files.write(self._bucket.name, values.reshape(-1))  # all of it: a part is a block, and this is one
            self._buffers.flush()  # what fails is this call's error
        except BaseException:
            files.roll_back()  # for the next attempt
            raise


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
        leaves = (leaf for tree in trees for leaf in leaves_of(tree))
        found = [leaf.files for leaf in leaves if isinstance(leaf, (OnDisk, BucketOnDisk))]
        self._files: list[Committing] = list({id(files): files for files in found}.values())
        self._begun: list[Committing] = []

    def begin(self) -> None:
        """Keep what was written before."""
        for files in self._files:
            files.commit()
            self._begun.append(files)

    def take_back(self) -> None:
        """Make everything as it was at `begin`."""
        for files in self._begun:
            files.roll_back()


def replaced_on_disk(plan: Plan, mesh: Mesh, states: Tree, replace: Callable[[], Tree]) -> Tree:
    """What ``replace`` makes of ``states``, with those on disk written in place: on all ranks, or on none. The leaves on disk
    of ``states``, and of copies of it, are used up.

    Raises:
        RankFailure: it failed on other ranks. Where it failed, its own error is raised.
    """
    leaves = [leaf for leaf in leaves_of(states) if isinstance(leaf, OnDisk)]
    writes, made = InPlace(leaves), list[Tree]()

    def work() -> None:
        writes.begin()
        after = replace()
        follow(after)
        made.append(followed(after))

    failure, problems, _ = attempted(mesh, work)
    if problems:
        writes.take_back()
        raise error_of(failure, problems, "states on disk were not replaced, and are as they were")
    for files in {id(leaf.files): leaf.files for leaf in leaves}.values():
        files.version += 1
    return tree_map(lambda leaf: leaf.renewed() if isinstance(leaf, OnDisk) else leaf, made[0])
