"""Where masters and optimizer states are between updates: where the optimizer works on them, or on disk.

An update asks for its groups of buckets one after the other (`awake`), and gives each back (`asleep`). States that stay where
they are worked on pass through unchanged. States on disk are read groups ahead, written behind, and committed as one step. In
a train state `OnDisk` leaves stand for them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import optree
import torch

from shardlib.collectives.attempts import on_all_ranks
from shardlib.errors import IllegalComposition
from shardlib.mesh.memories import AHEAD, MEMORIES, window
from shardlib.mesh.mesh import Mesh
from shardlib.optim.base import GradientTransformation, Packed
from shardlib.optim.on_disk import OnDisk
from shardlib.optim.train_state import OptimizerState
from shardlib.plan.plan import Plan
from shardlib.sharded.disk import Flat, Store
from shardlib.tree import flatten, leaves_of, path_name, tree_map, unflatten


class Resting(Protocol):
    """The states of groups of buckets, between and during updates.

    Attributes:
        at_once: whether there is memory for all states at once, and for old ones beside new ones.
    """

    at_once: bool

    def awake(self, groups: Iterable[OptimizerState]) -> Iterator[OptimizerState]:
        """The groups' states as tensors, one after the other. The caller gives each back before it takes the next."""
        ...

    def asleep(self, state: OptimizerState) -> OptimizerState:
        """A group's state, given back after its update or its first values; the result belongs into a train state."""
        ...

    def commit(self) -> None:
        """Complete a step, of which every group was given back."""
        ...


class InMemory:
    """States that stay where the optimizer works on them."""

    at_once = True

    def awake(self, groups: Iterable[OptimizerState]) -> Iterator[OptimizerState]:
        return iter(groups)

    def asleep(self, state: OptimizerState) -> OptimizerState:
        return state

    def commit(self) -> None:
        pass


class StatesOnDisk:
    """The states of all buckets whose memory rests on disk.

    Args:
        planned: the masters and the optimizer's state as tensors without memory.
    """

    at_once = False

    def __init__(self, plan: Plan, mesh: Mesh, planned: OptimizerState) -> None:
        buffers: dict[str, Flat] = {}
        sizes: dict[str, int] = {}
        tree: Any = planned
        paths, leaves, _ = optree.tree_flatten_with_path(tree)
        for path, leaf in zip(paths, leaves, strict=True):
            named = plan.numbering.run_named(path[-1])
            if named is not None and leaf.dim() and MEMORIES[plan.bucket_of[named[0]].memory.optimizer].rests:
                flat = buffers[path_name(path)] = Flat(leaf.numel(), leaf.dtype)
                sizes[named[0]] = sizes.get(named[0], 0) + flat.padded
        assert plan.claims is not None  # they say that the states are on disk
        folders = plan.claims.location("optimizer").folders
        self._buffers, self._awake = buffers, dict[str, torch.Tensor]()

        def open_files() -> None:
            memory, pinned = window(list(sizes.values())), mesh.transfers.apart
            self.store = Store(folders, buffers, memory, rank=mesh.rank, ranks=mesh.size, pinned=pinned)

        on_all_ranks(mesh, open_files, "the files for states on disk could not be opened")
        weakref.finalize(self, self.store.close)

    def awake(self, groups: Iterable[OptimizerState]) -> Iterator[OptimizerState]:
        known = list(groups)
        resting = [[leaf.name for leaf in leaves_of(group) if isinstance(leaf, OnDisk)] for group in known]
        for group, tensors in zip(known, self.store.fetched(resting, AHEAD), strict=True):
            self._awake = tensors
            try:
                yield tree_map(self._tensor, group)
            finally:  # of an update that failed
                for lent in self._awake.values():
                    self.store.release(lent)

    def _tensor(self, leaf: Any) -> Any:
        return self._awake[leaf.name].view(leaf.shape) if isinstance(leaf, OnDisk) else leaf

    def asleep(self, state: OptimizerState) -> OptimizerState:
        paths, leaves, treedef = flatten(state)
        after = []
        for path, leaf in zip(paths, leaves, strict=True):
            if path not in self._buffers:
                after.append(leaf)
                continue
            lent = self._awake.pop(path, None)
            flat = leaf.reshape(-1)
            if lent is not None and flat.data_ptr() != lent.data_ptr():
                flat = lent.copy_(flat)
            self.store.write(path, flat)
            after.append(OnDisk(self, path, leaf.shape, self._buffers[path]))
        return unflatten(treedef, after)

    def commit(self) -> None:
        self.store.commit((self.store.step or 0) + 1)


def resting_of(optimizer: GradientTransformation, plan: Plan, mesh: Mesh) -> Resting:
    """How the states of a train step rest between its updates.

    Raises:
        IllegalComposition: states on disk, and an optimizer that needs all of them at once or packs them itself.
        StorageError: the folders are in use, hold another plan's states, or have too little space.
    """
    if not any(MEMORIES[bucket.memory.optimizer].rests for bucket in plan.everywhere.trained):
        return InMemory()
    if not optimizer.separable:
        raise IllegalComposition(
            "offload keeps states on disk, of which a few buckets are in memory at a time, and this optimizer reads across "
            "parameters, so that it needs all of them; use offload('host')"
        )
    inner, _ = optimizer.planned(plan)
    if any(
        isinstance(node, Packed) for node in optree.tree_leaves(inner, is_leaf=lambda node: isinstance(node, Packed))
    ):
        raise IllegalComposition(
            "offload keeps states on disk, and this optimizer packs its state in few bits; use offload('host') with it, or "
            "an optimizer with plain moments, such as adamw"
        )
    masters = {
        bucket.name: torch.empty(bucket.owned, dtype=bucket.master_dtype, device="meta")
        for bucket in plan.trained
        if bucket.master_dtype is not None
    }
    return StatesOnDisk(plan, mesh, OptimizerState(masters, inner))
