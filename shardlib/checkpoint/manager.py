"""`Manager`: the checkpoints of a run, saved while it trains on."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from shardlib.checkpoint import restore as restoring
from shardlib.checkpoint.save import prepared, save, saved_fragments
from shardlib.checkpoint.snapshot import PATIENCE, BackgroundSave, Snapshot
from shardlib.mesh.launch.supervised import INTERRUPT, RESIZE, STOPPING, Signals, Supervisor, exit_code
from shardlib.mesh.mesh import Mesh
from shardlib.mesh.transport.activity import naming
from shardlib.optim.checks import is_step
from shardlib.optim.on_disk import in_files
from shardlib.optim.train_state import TrainState


class Manager:
    """The checkpoints of a run in one folder::

        with sl.checkpoint.Manager("run", every=100) as manager:
            if manager.latest():
                state = manager.restore(state)
            while state.step < 1000:
                state, metrics = train_step(state, batch_at(state.step))
                manager.step(state)

    A save copies this rank's part of the state to host memory, and a thread writes the copy while training goes on. A state
    that is on disk (``sl.offload("disk")``) does not fit there: it is saved before the call returns. Every rank must make the
    same calls after the same steps.

    From the first `step` inside ``with`` on, in the main thread, a rank takes note of SIGTERM and SIGUSR1. At the end of the
    step in which one rank has received one, all ranks save and end with exit code 143 (SIGTERM) or 138 (SIGUSR1).

    Args:
        folder: a folder that all ranks see.
        keep: how many of the newest checkpoints stay.
        every: steps between the saves of `step`; None for none.
        asynchronous: whether `save` and `step` return before the checkpoint is on the disk.
        interrupt: whether Ctrl-C is such a signal too, with exit code 130; a second one stops at once.

    Attributes:
        folder: the folder.

    Raises:
        ValueError: ``keep`` or ``every`` is no integer from 1.

    >>> state, _ = sl.make_train_step(lambda p, x: (p["w"] * x).sum(), {"w": torch.ones(2)}, sl.optim.sgd(1e-3))
    >>> with sl.checkpoint.Manager("run") as manager:
    ...     manager.save(state)
    >>> manager.latest().name
    'step-00000000'
    """

    def __init__(
        self,
        folder: str | Path,
        keep: int = 3,
        every: int | None = None,
        asynchronous: bool = True,
        *,
        interrupt: bool = False,
    ) -> None:
        if not all(is_step(count) for count in (keep, *([every] if every is not None else []))):
            raise ValueError(
                f"Manager: keep={keep!r} and every={every!r}, but both are integers from 1 (or every=None)"
            )
        self.folder, self._keep, self._every, self._asynchronous = Path(folder), keep, every, asynchronous
        self._interrupt, self._snapshot = interrupt, Snapshot()
        self._running: BackgroundSave | None = None
        self._signals: Signals | None = None
        self._supervisor = Supervisor(None)

    def __enter__(self) -> Manager:
        if threading.current_thread() is threading.main_thread():
            self._signals, self._supervisor = Signals(self._interrupt), Supervisor(os.environ)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if kind is None:
                self.wait()
            elif self._running is not None:
                # Another run, which may begin in this process, must not meet a save that is still being written.
                self._running.thread.join(PATIENCE / 6)
        finally:
            signals, self._signals = self._signals, None
            if signals is not None:
                signals.release(again=kind is None)  # one that came after the last step

    def step(
        self, state: TrainState, notes: dict[str, Any] | None = None, also: Mapping[str, Any] | None = None
    ) -> None:
        """Save ``state`` if it is due. To be called after every step.

        Args:
            notes, also: as in `shardlib.checkpoint.save`.

        Raises:
            CheckpointError: an earlier save has failed; on all ranks at the same step.
            SystemExit: a rank has received a signal to end, or `shardlib run` starts the ranks again with more of them;
                ``state`` is on the disk.
        """
        mesh = state.params.mesh
        if self._signals is not None:
            self._signals.catch()
        self._supervisor.done(state.step)
        received = self._exchange(mesh)
        due = self._every is not None and state.step % self._every == 0
        if due or received:
            self.save(state, notes, also)
        if received or (due and self._supervisor.resizes()):
            self.wait()
            raise SystemExit(exit_code(received) if received else RESIZE)

    @naming("the checkpoint")
    def save(
        self, state: TrainState, notes: dict[str, Any] | None = None, also: Mapping[str, Any] | None = None
    ) -> None:
        """Save ``state``. An earlier save that is still being written is waited for.

        Raises:
            CheckpointError: an earlier save has failed, the folder holds a checkpoint of a later step, or ranks differ in
                what is not sharded.
            RankFailure: without ``asynchronous``: other ranks could not write their files.
        """
        self.wait()
        if not self._asynchronous or in_files(state.params.plan):
            save(self.folder, state, self._keep, notes, also)
            self._supervisor.saved(state.step)
            return
        fragments = saved_fragments(state, also)
        commit = prepared(self.folder, state, self._keep, notes)
        self._running = BackgroundSave(commit, state.params.mesh, *self._snapshot.take(fragments))

    @naming("the checkpoint")
    def wait(self) -> None:
        """Wait until the last save is on the disk.

        Raises:
            CheckpointError: it has failed.
        """
        if self._running is not None:
            running, self._running = self._running, None
            running.wait()
            running.check()
            self._supervisor.saved(running.step)

    def latest(self) -> Path | None:
        """The newest complete checkpoint, or None."""
        return restoring.latest(self.folder)

    def restore(
        self, like: TrainState, *, partial: Sequence[str] = (), also: Mapping[str, Any] | None = None
    ) -> TrainState:
        """The newest checkpoint in the layout of ``like``: see `shardlib.checkpoint.restore`."""
        self.wait()
        state = restoring.restore(self.folder, like, partial=partial, also=also)
        self._supervisor.begun(state.step)
        return state

    @naming("the end of the step")
    def _exchange(self, mesh: Mesh) -> int:
        """Agree with all ranks, in one small sum, whether the running save has ended, and return the signal that a rank has
        received, or 0."""
        running, received = self._running, self._signals and self._signals.received
        asked = (*STOPPING, INTERRUPT)
        counts = torch.tensor(
            [
                *(number == received for number in asked),
                running is not None and running.thread.is_alive(),
                running is not None and running.problem != "",
            ],
            dtype=torch.int64,
            device=mesh.device,
        )
        for axis, size in mesh.shape.items():
            if size > 1:
                mesh.group(axis).all_reduce(counts).wait()
        *signals, writing, failed = counts.tolist()
        if running is not None and (failed or not writing):
            self.wait()
        return next((number for number, count in zip(asked, signals, strict=True) if count), 0)
