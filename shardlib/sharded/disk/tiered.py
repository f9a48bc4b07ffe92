"""`TieredBuffers`: a run's buffers that lie on disk between their uses, and pass through host memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from shardlib.collectives.attempts import on_all_ranks
from shardlib.errors import DonatedStateError
from shardlib.mesh.mesh import Mesh
from shardlib.plan.plan import Plan
from shardlib.sharded.disk.files import Flat
from shardlib.sharded.disk.store import Store

FOLDERS = {"param": "parameters", "grad": "gradients", "optimizer": ""}  # beside the files of the optimizer's states
_NAMES = {"param": "parameters", "grad": "gradients", "optimizer": "states"}


def open_on_all_ranks(mesh: Mesh | None, open_store: Callable[[int, int], Store], problem: str) -> Store:
    """A store that is open on every rank or on none. Collective.

    Args:
        mesh: None for what one rank alone has.
        open_store: ``open_store(rank, ranks)`` opens that of a rank.
        problem: begins the error about other ranks.

    Raises:
        StorageError: as of `Store`.
        RankFailure: it could not be opened on other ranks.
    """
    if mesh is None:
        return open_store(0, 1)
    opened: list[Store] = []
    try:
        on_all_ranks(mesh, lambda: opened.append(open_store(mesh.rank, mesh.size)), problem)
    except BaseException:
        for store in opened:  # for the next attempt
            store.close()
        raise
    return opened[0]


class TieredBuffers:
    """The buffers of a rank's parameters, gradients or optimizer states under a plan that has them on disk.

    `get` copies a buffer to memory and `put` writes one behind; what reads ahead, or works in the memory that buffers pass
    through, uses the `store`. `commit` makes what was put the buffers' values, and `roll_back` takes it back.

    Args:
        role: "param", "grad" or "optimizer".
        memory: bytes of host memory that buffers pass through.
        slots: 2; or 1 for scratch, of which nothing is committed.

    Attributes:
        store: the files.
        version: the number of the trees or states that the values belong to; those of earlier ones are written over.
        coming: the number that the next commit gives.
        writes: how many there have been, without those that were taken back.

    Raises:
        StorageError: the folders are in use, hold other buffers, cannot be written to, or have too little space.
        RankFailure: those of another rank.
    """

    mesh: Mesh
    store: Store
    version: int
    coming: int
    writes: int

    def __init__(
        self, plan: Plan, mesh: Mesh, role: str, buffers: Mapping[str, Flat], memory: int, slots: int = 2
    ) -> None:
        assert plan.claims is not None  # they say what is on disk
        folders = [Path(folder) / FOLDERS[role] for folder in plan.claims.location(role).folders]

        def open_store(rank: int, ranks: int) -> Store:
            pinned = mesh.transfers.apart
            return Store(folders, buffers, memory, rank=rank, ranks=ranks, pinned=pinned, durable=False, slots=slots)

        problem = f"the files for {_NAMES[role]} on disk could not be opened"
        self.mesh, self.store = mesh, open_on_all_ranks(mesh, open_store, problem)
        self.version = self.coming = self.writes = self._committed = 0
        weakref.finalize(self, self.store.close_anywhere)  # on whichever thread it is collected
        mesh.kept.add(self)

    def require(self, version: int, what: str) -> None:
        """Refuse what belongs to an earlier version.

        Raises:
            DonatedStateError: it was written over; names ``what``.
        """
        if version < self.version:
            raise DonatedStateError(f"{what} lay on disk, where a later state is now. Use the state of the last step")

    def get(self, name: str) -> torch.Tensor:
        """A copy of a buffer, in plain host memory."""
        with self.store.reading(name) as lent:
            return lent.clone()

    def put(self, name: str, values: torch.Tensor) -> None:
        """Begin to write a buffer. The values, in any memory, are copied before this returns."""
        self.writes += 1
        self.store.write(name, values)

    def flush(self) -> None:
        """Wait for what is being written; raises an error if something could not be."""
        self.store.flush()

    def settle(self) -> None:
        """Commit what was put under the present version, so that what comes can be taken back to it."""
        self.coming = self.version
        self.commit()

    def commit(self) -> None:
        """Make what was put the values that `roll_back` goes back to."""
        self.store.commit((self.store.step or 0) + 1)
        self.version, self._committed = self.coming, self.writes

    def roll_back(self) -> None:
        """Take back what was put since the last commit, and errors with it."""
        self.store.roll_back()
        self.coming, self.writes = self.version, self._committed

    def give_back(self) -> None:
        """Free the memory that buffers pass through; the next use makes it anew."""
        self.store.give_back()

    def close(self) -> None:
        """Close the files, for the next attempt to make a train step."""
        self.store.close()
