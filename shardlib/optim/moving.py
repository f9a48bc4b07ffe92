"""`to_host`, `to_disk` and `to_device`, for runs that share a device with other work.

A folder that states are moved to holds one state, which all ranks have: it is written and read on all ranks or on none.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, overload

import torch

from shardlib.collectives.attempts import on_all_ranks
from shardlib.common.devices import pins
from shardlib.common.environment import environment
from shardlib.common.tensors import raw_bytes
from shardlib.errors import StorageError, TreeError
from shardlib.optim.moved import Moved, Parked, StateSkeleton, View, donate, taken_apart
from shardlib.optim.on_disk import InPlace
from shardlib.optim.train_state import TrainState
from shardlib.plan.loss_scale import LossScale
from shardlib.rng import Key
from shardlib.sharded.disk import Flat, Store, open_on_all_ranks
from shardlib.tree import T

Folders = str | Path | Sequence[str | Path]


@overload
def to_host(state: Moved[T]) -> Moved[T]: ...
@overload
def to_host(state: T) -> Moved[T]: ...
def to_host(state: Any) -> Moved:
    """Move a state to host memory (pinned, where there is an accelerator), so that its device memory is free.

    A mesh on the CPU has one memory: there nothing is copied. What is on disk (``sl.offload("disk")``) stays there.

    Args:
        state: a `TrainState`, a `Sharded` tree or any pytree, which is donated; or a state that `to_disk` has moved.

    >>> state, train_step = sl.make_train_step(lambda p, x: (p["w"] * x).sum(), {"w": torch.ones(2)}, sl.optim.sgd(0.1))
    >>> state = sl.to_host(state)
    >>> state
    Moved(the state of step 0, in host memory)
    >>> state, metrics = train_step(sl.to_device(state), torch.ones(2))
    """
    if isinstance(state, Moved):
        held = state.holding()
        if not isinstance(held, Parked):
            return state
        with MovedFiles(state.skeleton, held.folders, f"{state!r} could not be read") as files:
            files.require(held.move)
            storages = files.read(View.on_host)
        state.take()
        return Moved(state.skeleton, "host memory", storages)
    skeleton, storages = taken_apart(state)
    for name, view in skeleton.views.items():
        if view.device.type != "cpu":
            storages[name] = view.on_host().copy_(storages[name])
    donate(state, skeleton.what, "to_host")
    _give_back(skeleton)
    return Moved(skeleton, "host memory", storages)


@overload
def to_disk(state: Moved[T], folder: Folders) -> Moved[T]: ...
@overload
def to_disk(state: T, folder: Folders) -> Moved[T]: ...
def to_disk(state: Any, folder: Folders) -> Moved:
    """Move a state into files, so that its memory is free. When this returns, the state is on the disk, whole.

    A process that dies afterwards has lost nothing: ``sl.to_device(folder, like=state)`` takes the state up in another one.
    That holds for what is on disk too (``sl.offload("disk")``), which is copied from its files.
    The files stay when the state has come back, and the next call with the same folder writes beside what they hold, so that
    one of the two states is there whenever the process dies.

    Args:
        state: a `TrainState`, a `Sharded` tree or any pytree, which is donated; or a state that `to_host` has moved. With
            several ranks, every rank calls this, and a pytree has sharded parts, which say what each rank holds.
        folder: one or several, on different disks; ranks may share them. They are given as much space as two states need.

    Raises:
        StorageError: the folder is in use, holds another plan's state, or one that has not been brought back; or it has too
            little space. The state stays as it was.
        RankFailure: another rank could not write.
        TreeError: a pytree without sharded parts, on several ranks; or complex numbers, or large arrays of NumPy's.

    >>> state, train_step = sl.make_train_step(lambda p, x: (p["w"] * x).sum(), {"w": torch.ones(2)}, sl.optim.sgd(0.1))
    >>> sl.to_disk(state, "parked")
    Moved(the state of step 0, in parked)
    >>> fresh, train_step = sl.make_train_step(lambda p, x: (p["w"] * x).sum(), {"w": torch.ones(2)}, sl.optim.sgd(0.1))
    >>> state, metrics = train_step(sl.to_device("parked", like=fresh), torch.ones(2))
    """
    folders = _several(folder)
    where = ", ".join(map(str, folders))
    if isinstance(state, Moved):
        skeleton, held = state.skeleton, state.holding()
        if isinstance(held, Parked):
            raise TreeError(f"{state!r} is on disk already; sl.to_host(state) brings it into memory first")
        storages = held
    else:
        skeleton, storages = taken_apart(state)
    with MovedFiles(skeleton, folders, f"the state was not moved to {where}, and is where it was") as files:
        files.require_free()
        move = files.write(storages)
    if isinstance(state, Moved):
        state.take()
    else:
        donate(state, skeleton.what, "to_disk")
    _give_back(skeleton)
    return Moved(skeleton, where, Parked(folders, move))


@overload
def to_device(moved: Moved[T]) -> T: ...
@overload
def to_device(moved: Folders, like: T) -> T: ...
def to_device(moved: Moved | Folders, like: Any = None) -> Any:
    """Bring a state back to where it was before `to_host` or `to_disk`: the same values, to the bit.

    Args:
        moved: what `to_host` or `to_disk` returned, which is used up; or the folder into which a run that has ended moved its
            state.
        like: with a folder: a fresh state of the same loss function, plan and optimizer, which is donated.

    Raises:
        StorageError: the folder holds no state, another one, or another plan's, or is damaged. The state stays where it is.
        torch.OutOfMemoryError: there is too little memory now. The state stays where it is.

    >>> params = sl.to_device(sl.to_host(sl.shard({"w": torch.ones(2)}, sl.make_mesh())))
    >>> params["w"]
    tensor([1., 1.])
    """
    if not isinstance(moved, Moved):
        return _taken_up(_several(moved), like)
    held = moved.holding()
    if isinstance(held, Parked):
        with MovedFiles(moved.skeleton, held.folders, f"{moved!r} could not be read") as files:
            files.require(held.move)
            storages = files.read(View.home)
    else:
        views = moved.skeleton.views
        storages = {
            name: storage if views[name].device.type == "cpu" else views[name].home().copy_(storage)
            for name, storage in held.items()
        }
    state = moved.skeleton.whole(storages)
    moved.take()
    return state


def _taken_up(folders: tuple[str | Path, ...], like: Any) -> Any:
    """The state that a run which has ended left in folders."""
    if like is None:
        raise TypeError("sl.to_device of a folder needs like=, a fresh state of the plan that the folder's state has")
    skeleton, _ = taken_apart(like)
    with MovedFiles(skeleton, folders, f"the state in {', '.join(map(str, folders))} cannot be taken up") as files:
        files.require()
        storages = files.read(View.home)
        files.restore_notes()
    donate(like, "this state", "to_device")
    return skeleton.whole(storages)


def _give_back(skeleton: StateSkeleton) -> None:
    """Free the host memory that steps keep for states that have left."""
    if skeleton.mesh is not None:
        skeleton.mesh.kept.give_back()


def _several(folder: Folders) -> tuple[str | Path, ...]:
    return (folder,) if isinstance(folder, (str, Path)) else tuple(folder)


class MovedFiles:
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
        self.where: str = ", ".join(map(str, folders))
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
        self.notes: dict[str, Any] | None = newest[skeleton.mesh.rank if skeleton.mesh else 0] if newest else None
        self.taken: bool = all(notes["taken"] for notes in newest)

    def __enter__(self) -> MovedFiles:
        return self

    def __exit__(self, *_: object) -> None:
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
                f"{self.where} holds {self.notes['what']}, which no run has taken up since it was moved there. Bring it back "
                "(sl.to_device, with like= in another process), name another folder, or remove its files"
            )

    def require(self, move: str | None = None) -> None:
        """Refuse to take up nothing, another state than that of ``move``, or one that the skeleton does not fit.

        Raises:
            StorageError: on all ranks alike.
        """
        if self.notes is None:
            raise StorageError(
                f"{self.where} holds no state that is whole on every rank. Name the folder that sl.to_disk was given, or "
                "restore a checkpoint"
            )
        if move not in (None, self.notes["move"]):
            raise StorageError(
                f"{self.where} no longer holds {self._skeleton.what}: {self.notes['what']} was moved there since. Give each "
                "its own folder"
            )
        if self.notes["form"] != self._skeleton.form:
            raise StorageError(
                f"{self.where} holds {self.notes['what']} with other shapes, dtypes or shards than like=. Give a fresh state "
                "of the loss function, plan, mesh and optimizer that it was moved with"
            )

    def write(self, storages: dict[str, torch.Tensor]) -> str:
        """Make the skeleton's state the newest one, and return its move. The one before stays until all ranks have written.

        Args:
            storages: path -> bytes of each storage.
        """
        state = self._skeleton.state
        notes = {"move": self._draw, "taken": False, "what": self._skeleton.what, "form": self._skeleton.form}
        notes["numbers"] = self._skeleton.numbers
        if isinstance(state, TrainState):
            scale = asdict(state.scale) if state.scale else None
            notes |= {"step": state.step, "seed": state.rng.seed, "scale": scale}

        def work(store: Store) -> None:
            for name, storage in storages.items():
                store.write(name, storage)
            for name, leaf in self._skeleton.on_disk.items():
                store.write(name, raw_bytes(leaf.unpacked().contiguous()))
            store.commit(self._next, json.dumps(notes).encode())

        self._with_newest(work)
        return self._draw

    def read(self, make: Callable[[View], torch.Tensor]) -> dict[str, torch.Tensor]:
        """The storages of the newest state, in memory that ``make`` makes. What rests in files of its own goes there; where
        that fails on a rank, those files are as they were on all."""
        views, on_disk = self._skeleton.views, self._skeleton.on_disk
        storages: dict[str, torch.Tensor] = {}
        writes = InPlace(on_disk.values())

        def work(store: Store) -> None:
            writes.begin()
            for group in store.fetched([[name] for name in (*views, *on_disk)]):
                for name, tensor in group.items():
                    if name in on_disk:
                        on_disk[name].pack(tensor.view(on_disk[name].like.dtype))
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
        notes = self.notes
        assert notes is not None
        self._skeleton.what = notes["what"]
        self._skeleton.take_numbers(notes["numbers"])
        state = self._skeleton.state
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

    def _together(self, work: Callable[[], T]) -> list[T]:
        """Run ``work`` on every rank that holds a part of the state; a tree without a mesh is one rank's."""
        mesh = self._skeleton.mesh
        return [work()] if mesh is None else on_all_ranks(mesh, work, self._problem)


def _opened(skeleton: StateSkeleton, folders: Sequence[str | Path], problem: str) -> Store:
    sizes = {name: view.bytes for name, view in skeleton.views.items()}
    sizes |= {name: leaf.like.nbytes for name, leaf in skeleton.on_disk.items()}
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
            f"{skeleton.what} has no sharded part that says which of {ranks} ranks holds what. Move a TrainState or a "
            "Sharded tree (sl.shard), or a tree that has one"
        )
