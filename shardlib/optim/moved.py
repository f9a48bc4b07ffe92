"""States taken apart into storages and a skeleton, put together again; and `Moved`, which stands for one that is elsewhere.

What moves are storages, whole: tensors that share one, and views of it, do so again when they are back, and every bit is as
it was. States that lie on disk anyway are copied to the folder of a state that is moved to disk, and back.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, NoReturn

import numpy as np
import optree
import torch

from shardlib.common.devices import pages, pins
from shardlib.common.tensors import dtype_name
from shardlib.errors import DonatedStateError, TreeError, listing
from shardlib.mesh.mesh import Mesh
from shardlib.optim.on_disk import OnDisk, buckets_on_disk
from shardlib.optim.train_state import TrainState
from shardlib.sharded.tree import Sharded
from shardlib.tree import T_co, path_name

# A state's numbers, which lie in no storage: Python's, and NumPy's and its arrays.
_NUMBERS = (bool, int, float, complex, np.generic, np.ndarray)
_SMALL = 1000  # numbers of an array


@dataclass(frozen=True)
class View:
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
        return pages(self.bytes, True) if self.pinned else self._plain(self.device)

    def on_host(self) -> torch.Tensor:
        """New host memory for the storage."""
        return pages(self.bytes, True) if self.pinned or pins(self.device) else self._plain("cpu")

    def _plain(self, device: torch.device | str) -> torch.Tensor:
        return torch.empty(self.bytes, dtype=torch.uint8, device=device)


class StateSkeleton:
    """A state in which views stand for tensors.

    Attributes:
        state: the state.
        what: the state in words.
        views: path of a storage -> a view of it.
        on_disk: path -> a tensor that lies in files of its own.
        mesh: of the state's sharded parts; None if it has none.
    """

    state: Any
    what: str

    def __init__(self, state: Any, what: str) -> None:
        self.state, self.what = state, what
        leaves = list(_leaves(state))
        self.views: dict[str, View] = {leaf.storage: leaf for _, leaf in reversed(leaves) if isinstance(leaf, View)}
        self.on_disk: dict[str, OnDisk] = {path: leaf for path, leaf in leaves if isinstance(leaf, OnDisk)}
        sharded = list(_sharded(state))
        self.mesh: Mesh | None = sharded[0].mesh if sharded else None
        if len(shapes := {tuple(part.mesh.shape.items()) for part in sharded}) > 1:
            raise TreeError(
                f"parts of this tree have different meshes ({', '.join(str(dict(s)) for s in sorted(shapes))}). Move each"
            )

    @property
    def form(self) -> str:
        """A hash of what the bytes of the storages mean: two states of one form take each other's."""
        lines = [
            repr((path, dtype_name(v.dtype), v.offset, v.shape, v.stride)) for path, v in _leaves(self.state, View)
        ]
        lines += [repr((path, dtype_name(r.like.dtype), tuple(r.like.shape))) for path, r in self.on_disk.items()]
        lines += [
            repr((path, type(number).__name__, np.shape(number))) for path, number in _leaves(self.state, _NUMBERS)
        ]
        for part in _sharded(self.state):
            lines.append(repr(dict(part.mesh.shape)))
            lines += [
                repr((each.path, each.param.shape, each.param.spec, each.optimizer and each.optimizer.spec))
                for each in part.plan.placements
            ]
        return hashlib.blake2b("\n".join(lines).encode(), digest_size=8).hexdigest()

    @property
    def numbers(self) -> list[Any]:
        """The state's numbers in the order of its leaves, as JSON can hold them.

        Raises:
            TreeError: numbers that it cannot hold; lists them.
        """
        found = list(_leaves(self.state, _NUMBERS))
        lost = [
            f"{path}: {type(number).__name__}"
            for path, number in found
            if np.asarray(number).dtype.kind not in "biuf" or np.size(number) > _SMALL
        ]
        if lost:
            raise TreeError(
                f"the files of a moved state have no place for these:\n{listing(lost)}\nHold them in tensors"
            )
        return [number.tolist() if isinstance(number, (np.generic, np.ndarray)) else number for _, number in found]

    def take_numbers(self, values: Iterable[Any]) -> None:
        """Give the state other numbers, as `numbers` returns them."""
        given = iter(values)

        def taken(number: Any) -> Any:
            value = next(given)
            if isinstance(number, np.ndarray):
                return np.array(value, number.dtype).reshape(number.shape)
            return type(number)(value)

        self.state = _rebuilt(self.state, taken, _NUMBERS)

    def whole(self, storages: dict[str, torch.Tensor]) -> Any:
        """The state over storages."""
        state = _rebuilt(self.state, lambda view: view.of(storages[view.storage]))
        return state.fitting() if isinstance(state, TrainState) else state


def taken_apart(state: Any) -> tuple[StateSkeleton, dict[str, torch.Tensor]]:
    """A state's skeleton, and path -> bytes of each storage."""
    what = "this tree"
    if isinstance(state, TrainState):
        state, what = state.settled_on_disk(), f"the state of step {state.step}"
    storages: dict[str, torch.Tensor] = {}
    known: dict[tuple[torch.device, int], str] = {}
    for path, tensor in _leaves(state, torch.Tensor):
        storage = tensor.untyped_storage()
        if known.setdefault((tensor.device, storage.data_ptr()), path) == path:
            flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            storages[path] = flat.set_(storage, 0, (storage.nbytes(),), (1,))

    def view(tensor: torch.Tensor) -> View:
        name = known[tensor.device, tensor.untyped_storage().data_ptr()]
        return View(
            storage=name,
            bytes=storages[name].numel(),
            device=tensor.device,
            pinned=tensor.device.type == "cpu" and tensor.is_pinned(),
            dtype=tensor.dtype,
            offset=int(tensor.storage_offset()),
            shape=tuple(tensor.shape),
            stride=tensor.stride(),
        )

    return StateSkeleton(_rebuilt(state, view), what), storages


def donate(state: Any, what: str, by: str) -> None:
    """Mark the parts of a state as used up, so that they hold no memory."""
    remedy = f"what sl.{by} returned"
    for part in optree.tree_leaves(state, is_leaf=_is_part):
        if isinstance(part, TrainState):
            part.take(f"sl.{by}", remedy)
        elif isinstance(part, Sharded):
            part.take(f"{what} was donated: sl.{by} has moved it. Go on with {remedy}")


def _is_part(node: Any) -> bool:
    return isinstance(node, (Sharded, TrainState))


def _rebuilt(state: Any, move: Callable[[Any], Any], kinds: tuple[type, ...] = (torch.Tensor, View)) -> Any:
    """A state with other leaves in place of those of some kinds: by default other tensors, or views in place of them."""
    if isinstance(state, Sharded):
        buffers: Any = state.on_disk
        if buffers is None:
            buffers = {name: move(leaf) if isinstance(leaf, kinds) else leaf for name, leaf in state.buffers.items()}
        return Sharded(state.plan, state.mesh, state.role, buffers)
    if isinstance(state, TrainState):
        parts = (_rebuilt(part, move, kinds) for part in (state.params, state.opt, state.comm, state.buffers))
        params, opt, comm, buffers = parts
        return TrainState(state.step, params, opt, comm, buffers, state.scale, state.rng)

    def moved(node: Any) -> Any:
        if _is_part(node):
            return _rebuilt(node, move, kinds)
        return move(node) if isinstance(node, kinds) else node

    return optree.tree_map(moved, state, is_leaf=_is_part)


def _leaves(state: Any, kind: type | tuple[type, ...] = object) -> Iterator[tuple[str, Any]]:
    """(path, leaf) of all leaves of a kind, those of parts by the names of their buffers."""
    if isinstance(state, Sharded):
        found: list[tuple[str, Any]] = [*state.in_memory.items(), *buckets_on_disk(state).items()]
    elif isinstance(state, TrainState):
        parts = {"params": state.params, "opt": state.opt, "comm": state.comm, "buffers": state.buffers}
        found = [(f"{name}/{path}", leaf) for name, part in parts.items() for path, leaf in _leaves(part)]
    else:
        paths, nodes, _ = optree.tree_flatten_with_path(state, is_leaf=_is_part)
        found = []
        for path, node in zip(paths, nodes, strict=True):
            inner = _leaves(node) if _is_part(node) else [("", node)]
            found += [(path_name((*path, name) if name else path), leaf) for name, leaf in inner]
    yield from ((path, leaf) for path, leaf in found if isinstance(leaf, kind))


def _sharded(state: Any) -> Iterator[Sharded]:
    """The sharded trees in a state."""
    for part in optree.tree_leaves(state, is_leaf=_is_part):
        if isinstance(part, Sharded):
            yield part
        elif isinstance(part, TrainState):
            yield part.params


class Parked(NamedTuple):
    """Folders that a state was moved to, and by which move.

    Attributes:
        move: a number that no other move has; the same on all ranks.
    """

    folders: tuple[str | Path, ...]
    move: str


class Moved(Generic[T_co]):
    """A state that lies in host memory or on disk. `to_device` brings it back; until then nothing else can be done with it.

    Attributes:
        skeleton: the state, in which views stand for tensors.
        where: "host memory", or the folders.
    """

    skeleton: StateSkeleton
    where: str

    def __init__(self, skeleton: StateSkeleton, where: str, held: dict[str, torch.Tensor] | Parked) -> None:
        self.skeleton, self.where = skeleton, where
        self._held: dict[str, torch.Tensor] | Parked | None = held

    def holding(self) -> dict[str, torch.Tensor] | Parked:
        """What holds the state: path -> bytes of each storage, or files.

        Raises:
            DonatedStateError: another state has taken it over.
        """
        if self._held is None:
            raise DonatedStateError(f"{self.skeleton.what} was moved on from {self.where}; use what that call returned")
        return self._held

    def take(self) -> None:
        """Mark this as used up, because another state has taken over what it held."""
        self._held = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"Moved has no attribute {name!r}")
        self._refuse(name)

    def __reduce__(self) -> NoReturn:
        self._refuse("a copy of it, or a pickle")

    def __getitem__(self, key: Any) -> Any:
        self._refuse(f"[{key!r}]")

    def _refuse(self, use: str) -> NoReturn:
        raise TreeError(
            f"{self.skeleton.what} lies in {self.where}: bring it back with sl.to_device before it is used ({use})"
        )

    def __repr__(self) -> str:
        return f"Moved({self.skeleton.what}, in {self.where})"
