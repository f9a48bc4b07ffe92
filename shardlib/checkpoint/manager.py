"""`Manager`: the checkpoints of a run, saved while it trains on."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from shardlib.checkpoint.agreement import gathered
from shardlib.checkpoint.commit import Commit
from shardlib.checkpoint.fragments import Fragment, Saving
from shardlib.checkpoint.restore import latest, restore
from shardlib.checkpoint.save import prepared, save, saved_fragments
from shardlib.common.devices import pages, pins
from shardlib.errors import CheckpointError, RankFailure, listing
from shardlib.mesh.launch.supervised import INTERRUPT, RESIZE, STOPPING, Signals, Supervisor, exit_code
from shardlib.mesh.mesh import Mesh
from shardlib.mesh.transport import watch
from shardlib.mesh.transport.activity import naming
from shardlib.optim.checks import is_step
from shardlib.optim.on_disk import in_files
from shardlib.optim.train_state import TrainState
from shardlib.tree import T

_ALIGNMENT = 64  # bytes
_PATIENCE = 60.0  # seconds that the last save waits for other ranks when the program has come to its end


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

    folder: Path

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
            raise ValueError(f"Manager: keep={keep!r}, every={every!r}: both are integers from 1 (or every=None)")
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
                self._running.thread.join(_PATIENCE / 6)
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
            self._supervisor.saved(running.step)

    def latest(self) -> Path | None:
        """The newest complete checkpoint, or None."""
        return latest(self.folder)

    def restore(
        self, like: TrainState[T], *, partial: Sequence[str] = (), also: Mapping[str, Any] | None = None
    ) -> TrainState[T]:
        """The newest checkpoint in the layout of ``like``: see `shardlib.checkpoint.restore`."""
        self.wait()
        state = restore(self.folder, like, partial=partial, also=also)
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


class Snapshot:
    """Host memory for copies of fragments, which a thread can save while steps change the state. It is allocated once and
    reused; pinned, where fragments lie on a GPU."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def take(self, fragments: Saving) -> tuple[list[Fragment], torch.Event | None]:
        """The fragments with copies of their data, which overwrite those of the call before; and an event after which copies
        from a device are complete."""
        places, total = [], 0
        for fragment in fragments.outlines:
            places.append(total)
            size = fragment.data.numel() * fragment.data.element_size()
            total += -(-size // _ALIGNMENT) * _ALIGNMENT
        device = next((fragment.data.device for fragment in fragments.outlines if pins(fragment.data.device)), None)
        if self._memory.numel() < total:
            self._memory = pages(total, pinned=device is not None)
        copies = []
        for fragment, at in zip(fragments, places, strict=True):
            data = fragment.data.detach()
            host = self._memory[at : at + data.numel() * data.element_size()].view(data.dtype)
            copies.append(fragment._replace(data=host.copy_(data, non_blocking=device is not None)))
        if device is None:
            return copies, None
        # A later step's kernels come after the copies on the same stream; only the thread that saves has to wait for them.
        event = torch.Event(device)
        event.record()
        return copies, event


class BackgroundSave:
    """A checkpoint that a thread of this rank writes while training goes on; ``problem`` says why it failed."""

    problem: str
    mesh: Mesh
    step: int

    def __init__(self, commit: Commit, mesh: Mesh, fragments: Sequence[Fragment], copied: torch.Event | None) -> None:
        self.mesh, self.step, self.problem = mesh, commit.step, ""
        self._failed: set[int] = set()  # other ranks, as far as is known
        self._commit, self._fragments, self._copied = commit, fragments, copied
        self._patience: float | None = None
        self.thread: threading.Thread = threading.Thread(target=self._run, name=f"checkpoint of step {commit.step}")
        self.thread.start()

    def wait(self) -> None:
        """Wait until all ranks have written. Collective; raises `CheckpointError` on all ranks if one has failed."""
        # Rank 0's thread ends when those of all ranks have. So it is waited for last; and it is told of failures, since a
        # disk that takes no file takes no report of that either.
        if self.mesh.rank != 0:
            self.thread.join()
        self._failed = {rank for rank, problem in enumerate(gathered(self.mesh, self.problem)) if problem}
        self.thread.join()
        if problems := [problem for problem in gathered(self.mesh, self.problem) if problem]:
            raise CheckpointError(
                f"the checkpoint of step {self.step} was not written:\n{listing(problems)}\nEarlier ones are still there."
            )

    def _run(self) -> None:
        try:
            if self._copied is not None:
                self._copied.synchronize()
            self._commit.write(self._fragments)
            if self.mesh.rank == 0:
                self._commit.finish(self._awaited)
        except BaseException as error:
            self.problem = f"rank {self.mesh.rank}: {type(error).__name__}: {error}"

    def _awaited(self, ranks: Collection[int]) -> None:
        """Stop waiting for ranks without a report, once they have failed, no longer answer or this program is at its end."""
        if failed := sorted(self._failed & set(ranks)):
            raise RankFailure(f"rank {', '.join(map(str, failed))} has failed without a report in the folder")
        if lost := sorted(watch.lost() & set(ranks)):
            raise RankFailure(f"rank {', '.join(map(str, lost))} no longer answers, and has not written its files")
        if threading.main_thread().is_alive():
            return
        if self._patience is None:
            self._patience = time.monotonic() + _PATIENCE
        if time.monotonic() > self._patience:
            raise TimeoutError("other ranks have not written their files, and this program has come to its end")
