"""The files of states that were moved to disk: in a folder there is one state, which all ranks have."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch

from shardlib.collectives.attempts import on_all_ranks
from shardlib.common.devices import pins
from shardlib.common.environment import environment
from shardlib.common.tensors import raw_bytes
from shardlib.errors import StorageError, TreeError
from shardlib.optim.moving.skeleton import StateSkeleton, View
from shardlib.optim.on_disk import InPlace
from shardlib.optim.train_state import TrainState
from shardlib.plan.loss_scale import LossScale
from shardlib.rng import Key
from shardlib.sharded.disk import Flat, Store, open_on_all_ranks

_T = TypeVar("_T")


class OptimizerFiles:
    """The open files for states of one skeleton, and the newest state in them that is whole on every rank.

    A commit's number and *move*, which is drawn for it, are the same on all ranks. Ranks that died while they committed may
    stand one commit apart, and go on from the one that all have.

    Args:
        problem: begins the errors about other ranks.

    Attributes:
        where: the folders, in words.
        notes: what is kept beside the newest state's tensors; None if there is no state.
        taken: whether a run has gone on with the newest state.

    Raises:
        StorageError: the folders are in use, hold another plan's state, or have too little space.
        TreeError: a tree without a mesh, and several ranks.
    """

    def __init__(self, skeleton: StateSkeleton, folders: Sequence[str | Path], problem: str) -> None:
        _require_mesh(skeleton)
        self._skeleton, self._problem = skeleton, problem
        self.where = ", ".join(map(str, folders))
        self._store = store = _opened(skeleton, folders, problem)

        def look() -> tuple[str, dict[int, dict[str, Any]]]:
            return secrets.token_hex(8), {number: json.loads(store.notes_of(number)) for number in store.steps}

        try:
            looks = self._together(look)
        except BaseException:
            self.close()
            raise
        (self._draw, _), ranks = looks[0], [found for _, found in looks]
        moves = [{(number, notes["move"]) for number, notes in found.items()} for found in ranks]
        common = sorted(set.intersection(*moves))
        self._number = common[-1][0] if common else None
        self._next = 1 + max((number for found in ranks for number in found), default=0)
        newest = [found[self._number] for found in ranks] if self._number is not None else []
        self.notes = newest[skeleton.mesh.rank if skeleton.mesh else 0] if newest else None
        self.taken = all(notes["taken"] for notes in newest)

    def __enter__(self) -> OptimizerFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the files, for others to open."""
        self._store.close()

    def require_free(self) -> None:
        """Refuse to replace a state that no run has gone on with.

        Raises:
            StorageError: on all ranks alike.
        """
        if self.notes is not None and not self.taken:
            raise StorageError(
                f"{self.where} holds {self.notes['what']}, which no run has taken up since it was moved there: bring it back "
                "(sl.to_device, with like= in another process), name another folder, or remove its files if nobody needs it"
            )

    def require(self, move: str | None = None) -> None:
        """Refuse to take up nothing, another state than that of ``move``, or one that the skeleton does not fit.

        Raises:
            StorageError: on all ranks alike.
        """
        if self.notes is None:
            raise StorageError(
                f"{self.where} holds no state that is whole on every rank: name the folder that sl.to_disk was given, or "
                "restore a checkpoint"
            )
        if move not in (None, self.notes["move"]):
            raise StorageError(
                f"{self.where} no longer holds {self._skeleton.what}: {self.notes['what']} was moved there since. Give each "
                "its own folder"
            )
        if self.notes["form"] != self._skeleton.form:
            raise StorageError(
                f"{self.where} holds {self.notes['what']} with other shapes, dtypes or shards than the state it is to be "
                "taken up by: give like= a fresh state of the loss function, plan, mesh and optimizer that it was moved with"
            )

    def write(self, storages: dict[str, torch.Tensor]) -> str:
        """Make the skeleton's state the newest one, and return its move. The one before stays until all ranks have written.

        Args:
            storages: path -> bytes of each storage.
        """
        state = self._skeleton.state
        notes = {"move": self._draw, "taken": False, "what": self._skeleton.what, "form": self._skeleton.form}
        if isinstance(state, TrainState):
            scale = asdict(state.scale) if state.scale else None
            notes |= {"step": state.step, "seed": state.rng.seed, "scale": scale}

        def work(store: Store) -> None:
            for name, storage in storages.items():
                store.write(name, storage)
            for name, leaf in self._skeleton.resting.items():
                store.write(name, raw_bytes(leaf.unpacked().contiguous()))
            store.commit(self._next, json.dumps(notes).encode())

        self._with_newest(work)
        return self._draw

    def read(self, make: Callable[[View], torch.Tensor]) -> dict[str, torch.Tensor]:
        """The storages of the newest state, in memory that ``make`` makes. What rests in files of its own goes there; where
        that fails on a rank, those files are as they were on all."""
        views, resting = self._skeleton.views, self._skeleton.resting
        storages: dict[str, torch.Tensor] = {}
        writes = InPlace(resting.values())

        def work(store: Store) -> None:
            writes.begin()
            for group in store.fetched([[name] for name in (*views, *resting)]):
                for name, tensor in group.items():
                    if name in resting:
                        leaf = resting[name]
                        leaf.pack(tensor.view(leaf.like.dtype))
                    else:
                        storages[name] = make(views[name]).copy_(tensor)
                    store.release(tensor)
            assert self.notes is not None and self._number is not None
            if not self.notes["taken"]:
                store.commit(self._number, json.dumps(self.notes | {"taken": True}).encode())

        try:
            self._with_newest(work)
        except BaseException:
            writes.take_back()
            raise
        return storages

    def restore_notes(self) -> None:
        """Give the skeleton what of the newest state is no tensor."""
        state, notes = self._skeleton.state, self.notes
        assert notes is not None
        self._skeleton.what = notes["what"]
        if isinstance(state, TrainState):
            state.step, state.rng = notes["step"], Key(notes["seed"])
            state.scale = LossScale(**notes["scale"]) if notes["scale"] else None

    def _with_newest(self, work: Callable[[Store], None]) -> None:
        """Run ``work`` on every rank, from the newest state that all ranks have."""

        def on_rank() -> None:
            if self._number is not None:
                self._store.return_to(self._number)
            work(self._store)

        self._together(on_rank)

    def _together(self, work: Callable[[], _T]) -> list[_T]:
        """Run ``work`` on every rank that holds a part of the state; a tree without a mesh is one rank's."""
        mesh = self._skeleton.mesh
        return [work()] if mesh is None else on_all_ranks(mesh, work, self._problem)


def _opened(skeleton: StateSkeleton, folders: Sequence[str | Path], problem: str) -> Store:
    sizes = {name: view.bytes for name, view in skeleton.views.items()}
    sizes |= {name: leaf.like.nbytes for name, leaf in skeleton.resting.items()}
    buffers = {name: Flat(size, torch.uint8) for name, size in sizes.items()}
    memory = 2 * max((flat.padded for flat in buffers.values()), default=0)
    pinned = any(pins(view.device) for view in skeleton.views.values())

    def open_store(rank: int, ranks: int) -> Store:
        return Store(folders, buffers, memory, rank=rank, ranks=ranks, pinned=pinned)

    return open_on_all_ranks(skeleton.mesh, open_store, problem)


def _require_mesh(skeleton: StateSkeleton) -> None:
    """Refuse a tree that several ranks would each take for all there is."""
    mesh, distributed = environment().mesh, torch.distributed
    ranks = mesh.size if mesh else 1
    if distributed.is_available() and distributed.is_initialized():
        ranks = max(ranks, distributed.get_world_size())
    if skeleton.mesh is None and ranks > 1:
        raise TreeError(
            f"{skeleton.what} has no sharded part that says which of {ranks} ranks holds what, so that ranks would write "
            "over each other's files: move a TrainState or a Sharded tree (sl.shard), or a tree that has one"
        )
