"""States that are moved to host memory or to disk and back, for runs that share a device with other work.

What moves are storages, whole: tensors that share one, and views of it, do so again when they are back, and every bit is as
it was.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from shardlib.collectives.attempts import on_all_ranks
from shardlib.common.devices import pins
from shardlib.common.pages import pages
from shardlib.errors import DonatedStateError, StorageError, TreeError
from shardlib.mesh.mesh import Mesh
from shardlib.optim.train_state import TrainState
from shardlib.plan.loss_scale import LossScale
from shardlib.rng import Key
from shardlib.sharded.disk import Flat, Store
from shardlib.sharded.tree import Sharded
from shardlib.tree import flatten, tree_map

_T = TypeVar("_T")
Folders = str | Path | Sequence[str | Path]


@dataclass(frozen=True)
class _View:
    """A tensor's place in a storage, and where the storage belongs.

    Attributes:
        storage: the path of the first tensor in the storage.
        bytes: of the storage.
        pinned: whether the storage is in host memory for a device's copies.
    """

    storage: str
    bytes: int
    device: torch.device
    pinned: bool
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def of(self, storage: torch.Tensor) -> torch.Tensor:
        """The tensor, over a storage's bytes."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage.untyped_storage(), self.offset, self.shape, self.stride)

    def home(self) -> torch.Tensor:
        """New memory where the storage belongs."""
        if self.device.type == "cpu":
            return pages(self.bytes, self.pinned)
        return torch.empty(self.bytes, dtype=torch.uint8, device=self.device)


class Moved:
    """A state that lies in host memory or on disk. `to_device` brings it back; until then nothing else can be done with it.

    Attributes:
        skeleton: the state, in which views stand for tensors.
        what: the state in words.
        where: "host memory", or the folders.
    """

    def __init__(
        self, skeleton: Any, what: str, where: str, held: dict[str, torch.Tensor] | tuple[str | Path, ...]
    ) -> None:
        self.skeleton, self.what, self.where = skeleton, what, where
        self._held: dict[str, torch.Tensor] | tuple[str | Path, ...] | None = held

    def holding(self) -> Any:
        """What holds the state: path -> bytes of each storage, or folders.

        Raises:
            DonatedStateError: another state has taken it over.
        """
        if self._held is None:
            raise DonatedStateError(f"{self.what} was moved on from {self.where}; use what that call returned")
        return self._held

    def take(self) -> None:
        """Mark this as used up, because another state has taken over what it held."""
        self._held = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"Moved has no attribute {name!r}")
        raise TreeError(f"{self.what} lies in {self.where}: bring it back with sl.to_device before it is used ({name})")

    def __repr__(self) -> str:
        return f"Moved({self.what}, in {self.where})"


def to_host(state: Any) -> Moved:
    """Move a state to host memory (pinned, where there is an accelerator), so that its device memory is free.

    A mesh on the CPU has one memory: there nothing is copied.

    Args:
        state: a `TrainState`, a `Sharded` tree or any pytree, which is donated; or a state that `to_disk` has moved.

    >>> state, train_step = sl.make_train_step(lambda p, x: (p["w"] * x).sum(), {"w": torch.ones(2)}, sl.optim.sgd(0.1))
    >>> state = sl.to_host(state)
    >>> state
    Moved(the state of step 0, in host memory)
    >>> state, metrics = train_step(sl.to_device(state), torch.ones(2))
    """
    if isinstance(state, Moved):
        if isinstance(state.holding(), dict):
            return state
        return Moved(state.skeleton, state.what, "host memory", _fetched(state, _on_host))
    skeleton, storages, what = _apart(state)
    held = {
        name: storages.pop(name) if view.device.type == "cpu" else _on_host(view).copy_(storages.pop(name))
        for name, view in _views(skeleton).items()
    }
    _donate(state, what, "to_host")
    return Moved(skeleton, what, "host memory", held)


def to_disk(state: Any, folder: Folders) -> Moved:
    """Move a state into files, so that all of its memory is free. When this returns, the state is on the disk, whole.

    A process that dies afterwards has lost nothing: ``sl.to_device(folder, like=state)`` takes the state up in another one.
    The files stay when the state has come back, and the next call with the same folder writes beside what they hold, so that
    one of the two states is there whenever the process dies.

    Args:
        state: a `TrainState`, a `Sharded` tree or any pytree, which is donated; or a state that `to_host` has moved.
        folder: one or several, on different disks; ranks may share them. They are given as much space as two states need.

    Raises:
        StorageError: the folder is in use, holds another plan's state, or has too little space. The state stays as it was.
        RankFailure: another rank could not write.

    >>> state, train_step = sl.make_train_step(lambda p, x: (p["w"] * x).sum(), {"w": torch.ones(2)}, sl.optim.sgd(0.1))
    >>> sl.to_disk(state, "parked")
    Moved(the state of step 0, in parked)
    >>> fresh, train_step = sl.make_train_step(lambda p, x: (p["w"] * x).sum(), {"w": torch.ones(2)}, sl.optim.sgd(0.1))
    >>> state, metrics = train_step(sl.to_device("parked", like=fresh), torch.ones(2))
    """
    folders = _several(folder)
    where = ", ".join(map(str, folders))
    if isinstance(state, Moved):
        skeleton, storages, what = state.skeleton, state.holding(), state.what
        if not isinstance(storages, dict):
            raise TreeError(f"{state!r} is on disk already; sl.to_host(state) brings it into memory first")
    else:
        skeleton, storages, what = _apart(state)

    def write() -> None:
        with _store(skeleton, folders) as store:
            for name, storage in storages.items():
                store.write(name, storage)
            store.commit(_step(skeleton), json.dumps(_notes(skeleton)).encode())

    _on_all_ranks(_mesh(skeleton), write, f"the state was not moved to {where}, and is where it was")
    if isinstance(state, Moved):
        state.take()
    else:
        _donate(state, what, "to_disk")
    return Moved(skeleton, what, where, folders)


def to_device(moved: Moved | Folders, like: Any = None) -> Any:
    """Bring a state back to where it was before `to_host` or `to_disk`: the same values, to the bit.

    Args:
        moved: what `to_host` or `to_disk` returned, which is used up; or the folder into which a run that has ended moved its
            state.
        like: with a folder: a fresh state of the same loss function, plan and optimizer, which is donated.

    Raises:
        StorageError: the folder holds no state, or another plan's, or is damaged.

    >>> params = sl.to_device(sl.to_host(sl.shard({"w": torch.ones(2)}, sl.make_mesh())))
    >>> params["w"]
    tensor([1., 1.])
    """
    if not isinstance(moved, Moved):
        moved = _found(_several(moved), like)
    skeleton = moved.skeleton
    if isinstance(held := moved.holding(), dict):
        moved.take()
        storages = {
            name: held.pop(name) if view.device.type == "cpu" else view.home().copy_(held.pop(name))
            for name, view in _views(skeleton).items()
        }
    else:
        storages = _fetched(moved, _View.home)
    state = _rebuilt(skeleton, lambda view: view.of(storages[view.storage]))
    return state.fitting() if isinstance(state, TrainState) else state


def _apart(state: Any) -> tuple[Any, dict[str, torch.Tensor], str]:
    """A state's skeleton, in which views stand for tensors; path -> bytes of each storage; and what the state is."""
    what = "this tree"
    if isinstance(state, TrainState):
        state, what = state.settled(), f"the state of step {state.step}"
    storages: dict[str, torch.Tensor] = {}
    known: dict[tuple[torch.device, int], str] = {}
    for path, tensor in _tensors(state):
        storage = tensor.untyped_storage()
        if known.setdefault((tensor.device, storage.data_ptr()), path) == path:
            flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            storages[path] = flat.set_(storage, 0, (storage.nbytes(),), (1,))

    def view(tensor: torch.Tensor) -> _View:
        name = known[tensor.device, tensor.untyped_storage().data_ptr()]
        return _View(
            storage=name,
            bytes=storages[name].numel(),
            device=tensor.device,
            pinned=tensor.device.type == "cpu" and tensor.is_pinned(),
            dtype=tensor.dtype,
            offset=int(tensor.storage_offset()),
            shape=tuple(tensor.shape),
            stride=tensor.stride(),
        )

    return _rebuilt(state, view), storages, what


def _rebuilt(state: Any, move: Callable[[Any], Any]) -> Any:
    """A state with other tensors, or views in place of them."""
    if isinstance(state, Sharded):
        return Sharded(state.plan, state.mesh, state.role, {name: move(leaf) for name, leaf in state.buffers.items()})
    if isinstance(state, TrainState):
        params, opt, comm, buffers = (
            _rebuilt(part, move) for part in (state.params, state.opt, state.comm, state.buffers)
        )
        return TrainState(state.step, params, opt, comm, buffers, state.scale, state.rng)
    return tree_map(lambda leaf: move(leaf) if isinstance(leaf, (torch.Tensor, _View)) else leaf, state)


def _tensors(state: Any) -> Iterator[tuple[str, Any]]:
    """(path, tensor or view) of all of a state."""
    if isinstance(state, Sharded):
        yield from state.buffers.items()
    elif isinstance(state, TrainState):
        parts = {"params": state.params, "opt": state.opt, "comm": state.comm, "buffers": state.buffers}
        for name, part in parts.items():
            for path, leaf in _tensors(part):
                yield f"{name}/{path}", leaf
    else:
        paths, leaves, _ = flatten(state)
        for path, leaf in zip(paths, leaves, strict=True):
            if isinstance(leaf, (torch.Tensor, _View)):
                yield path, leaf


def _views(skeleton: Any) -> dict[str, _View]:
    """Path of a storage -> a view of it."""
    return {view.storage: view for _, view in reversed(list(_tensors(skeleton)))}


def _donate(state: Any, what: str, by: str) -> None:
    """Mark a state as used up, so that it holds no memory."""
    remedy = f"what sl.{by} returned"
    if isinstance(state, TrainState):
        state.take(f"sl.{by}", remedy)
    elif isinstance(state, Sharded):
        state.take(f"{what} was donated: sl.{by} has moved it. Go on with {remedy}")


def _on_host(view: _View) -> torch.Tensor:
    """Host memory for a storage."""
    return pages(view.bytes, view.pinned or pins(view.device))


def _several(folder: Folders) -> tuple[str | Path, ...]:
    return (folder,) if isinstance(folder, (str, Path)) else tuple(folder)


def _mesh(skeleton: Any) -> Mesh | None:
    if isinstance(skeleton, TrainState):
        return skeleton.params.mesh
    return skeleton.mesh if isinstance(skeleton, Sharded) else None


def _step(skeleton: Any) -> int:
    return skeleton.step if isinstance(skeleton, TrainState) else 0


def _store(skeleton: Any, folders: Sequence[str | Path]) -> Store:
    """The open files of a state."""
    views, mesh = _views(skeleton), _mesh(skeleton)
    buffers = {name: Flat(view.bytes, torch.uint8) for name, view in views.items()}
    memory = 2 * max((flat.padded for flat in buffers.values()), default=0)
    pinned = any(pins(view.device) for view in views.values())
    rank, ranks = (mesh.rank, mesh.size) if mesh else (0, 1)
    return Store(folders, buffers, memory, rank=rank, ranks=ranks, pinned=pinned)


def _fetched(moved: Moved, make: Callable[[_View], torch.Tensor]) -> dict[str, torch.Tensor]:
    """What is on disk, in memory that ``make`` makes."""
    views, storages, folders = _views(moved.skeleton), {}, moved.holding()

    def read() -> None:
        with _store(moved.skeleton, folders) as store:
            for group in store.fetched([[name] for name in views]):
                for name, tensor in group.items():
                    storages[name] = make(views[name]).copy_(tensor)
                    store.release(tensor)

    _on_all_ranks(_mesh(moved.skeleton), read, f"{moved!r} could not be read")
    moved.take()
    return storages


def _notes(skeleton: Any) -> dict[str, Any]:
    """What of a state is no tensor, for JSON."""
    if not isinstance(skeleton, TrainState):
        return {}
    return {"seed": skeleton.rng.seed, "scale": asdict(skeleton.scale) if skeleton.scale else None}


def _found(folders: Sequence[str | Path], like: Any) -> Moved:
    """The state that a run which has ended left in folders."""
    if like is None:
        raise TypeError("sl.to_device of a folder needs like=, a fresh state of the plan that the folder's state has")
    where = ", ".join(map(str, folders))
    skeleton, _, _ = _apart(like)
    mesh = _mesh(skeleton)

    def look() -> list[int]:
        with _store(skeleton, folders) as store:
            return store.steps

    steps = _on_all_ranks(mesh, look, f"the state in {where} cannot be taken up")
    common = set(steps[0]).intersection(*steps)
    if not common:
        raise StorageError(
            f"{where} holds no state that is whole on every rank (steps of the ranks: {steps}): name the folder that "
            "sl.to_disk was given, or restore a checkpoint"
        )

    def take_up() -> dict[str, Any]:
        with _store(skeleton, folders) as store:
            store.return_to(max(common))
            return json.loads(store.notes)

    notes, *_ = _on_all_ranks(mesh, take_up, f"the state in {where} cannot be taken up")
    if isinstance(skeleton, TrainState):
        skeleton.step, skeleton.rng = max(common), Key(notes["seed"])
        skeleton.scale = LossScale(**notes["scale"]) if notes["scale"] else None
    _donate(like, "this state", "to_device")
    return Moved(skeleton, f"the state of step {max(common)}", where, tuple(folders))


def _on_all_ranks(mesh: Mesh | None, work: Callable[[], _T], problem: str) -> list[_T]:
    """Run ``work`` on every rank that holds a part of a state; a plain pytree is one rank's alone."""
    return [work()] if mesh is None else on_all_ranks(mesh, work, problem)
