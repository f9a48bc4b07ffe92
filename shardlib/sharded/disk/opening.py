"""The files of all ranks of a run, opened together."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardlib.collectives.attempts import on_all_ranks
from shardlib.mesh.mesh import Mesh
from shardlib.sharded.disk.layout import Flat
from shardlib.sharded.disk.store import THREADS, Store


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


def open_for_run(
    mesh: Mesh, folders: Sequence[str | Path], buffers: Mapping[str, Flat], memory: int, problem: str, slots: int = 2
) -> Store:
    """A store that is this run's alone, as `open_on_all_ranks` opens it.

    Args:
        folders, buffers, memory, slots: as of `Store`.
    """
    pinned = mesh.transfers.apart

    def open_store(rank: int, ranks: int) -> Store:
        return Store(folders, buffers, memory, rank=rank, ranks=ranks, pinned=pinned, durable=False, slots=slots)

    return open_on_all_ranks(mesh, open_store, problem)


def close_with(holder: Any, store: Store) -> None:
    """Close a store when what holds it is collected, on whichever thread that is."""
    weakref.finalize(holder, _close, store)


def _close(store: Store) -> None:
    if threading.current_thread().name.startswith(THREADS):  # may be the store's own, which it cannot wait for
        threading.Thread(target=store.close).start()
    else:
        store.close()
