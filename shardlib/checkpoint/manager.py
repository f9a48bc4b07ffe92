"""`Manager`: the checkpoints of a run, saved while it trains on."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from shardlib.checkpoint import restore as restoring
from shardlib.checkpoint.agreement import on_all_ranks
from shardlib.checkpoint.commit import Commit
from shardlib.checkpoint.fragments import Fragment
from shardlib.checkpoint.save import facts, save, saved_fragments
from shardlib.checkpoint.snapshot import Snapshot
from shardlib.collectives import primitives
from shardlib.errors import CheckpointError, listing
from shardlib.mesh.mesh import Mesh
from shardlib.optim.train_state import TrainState

_PATIENCE = 60.0  # seconds that the last save waits for other ranks when the program has come to its end


class Manager:
    """The checkpoints of a run in one folder::

        with sl.checkpoint.Manager("run", every=100) as manager:
            if manager.latest():
                state = manager.restore(state)
            while state.step < 1000:
                state, metrics = train_step(state, batch_at(state.step))
                manager.step(state)

    A save copies this rank's part of the state to host memory, and a thread writes the copy while training goes on. Every
    rank must make the same calls after the same steps.

    Args:
        folder: a folder that all ranks see.
        keep: how many of the newest checkpoints stay.
        every: steps between the saves of `step`; None for none.
        asynchronous: whether `save` and `step` return before the checkpoint is on the disk.

    Raises:
        ValueError: ``keep`` or ``every`` is below 1.

    >>> state, _ = sl.make_train_step(lambda p, x: (p["w"] * x).sum(), {"w": torch.ones(2)}, sl.optim.sgd(1e-3))
    >>> with sl.checkpoint.Manager("run") as manager:
    ...     manager.save(state)
    >>> manager.latest().name
    'step-00000000'
    """

    def __init__(self, folder: str | Path, keep: int = 3, every: int | None = None, asynchronous: bool = True) -> None:
        if keep < 1 or (every is not None and every < 1):
            raise ValueError(f"Manager: keep={keep} and every={every}, but both are at least 1 (or every=None)")
        self._folder, self._keep, self._every, self._asynchronous = Path(folder), keep, every, asynchronous
        self._snapshot = Snapshot()
        self._running: _Save | None = None

    def __enter__(self) -> Manager:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self.wait()
        elif self._running is not None:
            # Another run, which may begin in this process, must not meet a save that is still being written.
            self._running.thread.join(_PATIENCE / 6)

    def step(
        self, state: TrainState, notes: dict[str, Any] | None = None, also: Mapping[str, Any] | None = None
    ) -> None:
        """Save ``state`` if it is due. To be called after every step.

        Args:
            notes, also: as in `shardlib.checkpoint.save`.

        Raises:
            CheckpointError: an earlier save has failed; on all ranks at the same step.
        """
        if self._running is not None and self._agreed(self._running, wait=False):
            self._running = None
        if self._every is not None and state.step % self._every == 0:
            self.save(state, notes, also)

    def save(
        self, state: TrainState, notes: dict[str, Any] | None = None, also: Mapping[str, Any] | None = None
    ) -> None:
        """Save ``state``. An earlier save that is still being written is waited for.

        Raises:
            CheckpointError: an earlier save has failed, or the folder holds a checkpoint of a later step.
            RankFailure: without ``asynchronous``: other ranks could not write their files.
        """
        self.wait()
        if not self._asynchronous:
            save(self._folder, state, self._keep, notes, also)
            return
        mesh = state.params.mesh
        commit = Commit(self._folder, facts(state, notes or {}), mesh.rank, mesh.size, self._keep)
        on_all_ranks(mesh, lambda: commit.prepare() if mesh.rank == 0 else None)
        self._running = _Save(commit, mesh, *self._snapshot.take(saved_fragments(state, also)))

    def wait(self) -> None:
        """Wait until the last save is on the disk.

        Raises:
            CheckpointError: it has failed.
        """
        if self._running is not None:
            running, self._running = self._running, None
            self._agreed(running, wait=True)

    def latest(self) -> Path | None:
        """The newest complete checkpoint, or None."""
        return restoring.latest(self._folder)

    def restore(
        self, like: TrainState, *, partial: Sequence[str] = (), also: Mapping[str, Any] | None = None
    ) -> TrainState:
        """The newest checkpoint in the layout of ``like``: see `shardlib.checkpoint.restore`."""
        self.wait()
        return restoring.restore(self._folder, like, partial=partial, also=also)

    @staticmethod
    def _agreed(running: _Save, wait: bool) -> bool:
        """Whether a save has ended on all ranks. All raise if it failed on one."""
        mesh = running.mesh
        if wait:
            # Rank 0's thread ends when those of all ranks have: no rank may be waited for before it has started its own.
            primitives.all_gather_object(mesh, list(mesh.shape), None)
            running.thread.join()
        report = not running.thread.is_alive(), running.problem
        reports = primitives.all_gather_object(mesh, list(mesh.shape), report)
        problems = [problem for _, problem in reports if problem]
        if problems:
            raise CheckpointError(
                f"the checkpoint of step {running.step} was not written:\n{listing(problems)}\nThe checkpoints before it are "
                "still there."
            )
        return all(ended for ended, _ in reports)


class _Save:
    """A checkpoint that a thread of this rank writes.

    Attributes:
        problem: why it failed, or "".
    """

    def __init__(
        self, commit: Commit, mesh: Mesh, fragments: Sequence[Fragment], copied: torch.cuda.Event | None
    ) -> None:
        self.mesh, self.step, self.problem = mesh, commit.step, ""
        self._commit, self._fragments, self._copied = commit, fragments, copied
        self._patience: float | None = None
        self.thread = threading.Thread(target=self._run, name=f"checkpoint of step {commit.step}")
        self.thread.start()

    def _run(self) -> None:
        try:
            if self._copied is not None:
                self._copied.synchronize()
            self._commit.write(self._fragments)
            if self.mesh.rank == 0:
                self._commit.finish(self._alive)
        except BaseException as error:
            self.problem = f"rank {self.mesh.rank}: {type(error).__name__}: {error}"

    def _alive(self) -> None:
        """Stop waiting for ranks that do not report, once this program is at its end."""
        if threading.main_thread().is_alive():
            return
        if self._patience is None:
            self._patience = time.monotonic() + _PATIENCE
        if time.monotonic() > self._patience:
            raise TimeoutError("other ranks have not written their files, and this program has come to its end")
