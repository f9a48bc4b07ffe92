"""What stands for tensors that lie on disk: `OnDisk` for those of a train state, `BucketOnDisk` for parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

from shardlib.collectives.attempts import attempted, error_of
from shardlib.mesh.memories import MEMORIES
from shardlib.mesh.mesh import Mesh
from shardlib.optim.base import Packed
from shardlib.plan.buckets import Bucket
from shardlib.plan.plan import Plan
from shardlib.sharded.disk import Flat, Store
from shardlib.sharded.on_disk import BuffersOnDisk
from shardlib.tree import leaves_of

_T = TypeVar("_T")


class HasStore(Protocol):
    """What keeps a store open."""

    store: Store


class OnDisk(Packed):
    """A tensor of a train state that lies on disk between updates. Checkpoints read it and write it whole."""

    rounds = False

    def __init__(self, states: HasStore, name: str, shape: torch.Size, flat: Flat) -> None:
        self._states, self.name, self.shape, self._flat = states, name, shape, flat
        self.block = max(1, flat.numel)

    @property
    def store(self) -> Store:
        """Where it lies."""
        return self._states.store

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


class BucketOnDisk(Packed):
    """A bucket of parameters on disk. Checkpoints and moves read it and write it whole."""

    rounds = False

    def __init__(self, buffers: BuffersOnDisk, bucket: Bucket) -> None:
        self._buffers, self._bucket = buffers, bucket
        self.block = max(1, self.like.numel())

    @property
    def like(self) -> torch.Tensor:
        return torch.empty(self._bucket.size(self._bucket.param_level), dtype=self._bucket.dtype, device="meta")

    def part(self, first: int, stop: int) -> torch.Tensor:
        return self._buffers[self._bucket.name][first:stop]

    def pack(self, values: torch.Tensor, first: int = 0) -> None:
        if values.numel() < self.like.numel():
            whole = self._buffers[self._bucket.name]
            whole[first : first + values.numel()] = values.reshape(-1)
            values = whole
        self._buffers.files.write(self._bucket.name, values.reshape(-1))
        self._buffers.flush()  # what fails is this call's error


def rests(plan: Plan) -> bool:
    """Whether states of a rank lie on disk between updates."""
    return any(MEMORIES[bucket.memory.optimizer].rests for bucket in plan.everywhere.trained)


def replaced_on_disk(plan: Plan, mesh: Mesh, states: Any, replace: Callable[[], _T]) -> _T:
    """What ``replace`` makes of ``states``, of which it writes those on disk in place: on all ranks, or on none.

    Raises:
        RankFailure: it failed on other ranks. Where it failed, its own error is raised.
    """
    leaves = [leaf for leaf in leaves_of(states) if isinstance(leaf, OnDisk)]
    stores = {id(leaf.store): leaf.store for leaf in leaves}.values()
    begun, made = list[Store](), list[_T]()

    def work() -> None:
        for store in stores:
            store.commit((store.step or 0) + 1)  # what was written before stays
            begun.append(store)
        made.append(replace())

    failure, problems, _ = attempted(mesh, work)
    if problems:
        for store in begun:
            store.roll_back()
        raise error_of(failure, problems, "states on disk were not replaced, and are as they were")
    return made[0]
