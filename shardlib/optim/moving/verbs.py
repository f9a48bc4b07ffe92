"""`to_host`, `to_disk` and `to_device`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardlib.errors import TreeError
from shardlib.optim.moving.files import OptimizerFiles
from shardlib.optim.moving.skeleton import Moved, Parked, StateSkeleton, View, apart, donate

Folders = str | Path | Sequence[str | Path]


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
        with OptimizerFiles(state.skeleton, held.folders, f"{state!r} could not be read") as files:
            files.require(held.move)
            storages = files.read(View.on_host)
        state.take()
        return Moved(state.skeleton, "host memory", storages)
    skeleton, storages = apart(state)
    for name, view in skeleton.views.items():
        if view.device.type != "cpu":
            storages[name] = view.on_host().copy_(storages[name])
    donate(state, skeleton.what, "to_host")
    _give_back(skeleton)
    return Moved(skeleton, "host memory", storages)


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
        TreeError: a pytree without sharded parts, on several ranks.

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
        skeleton, storages = apart(state)
    with OptimizerFiles(skeleton, folders, f"the state was not moved to {where}, and is where it was") as files:
        files.require_free()
        move = files.write(storages)
    if isinstance(state, Moved):
        state.take()
    else:
        donate(state, skeleton.what, "to_disk")
    _give_back(skeleton)
    return Moved(skeleton, where, Parked(folders, move))


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
        with OptimizerFiles(moved.skeleton, held.folders, f"{moved!r} could not be read") as files:
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
    skeleton, _ = apart(like)
    with OptimizerFiles(skeleton, folders, f"the state in {', '.join(map(str, folders))} cannot be taken up") as files:
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
