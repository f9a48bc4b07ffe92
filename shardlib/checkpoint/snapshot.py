"""A copy of fragments in host memory, which a background thread can save while the next steps change the state."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence

import torch

from shardlib.checkpoint.commit import Commit
from shardlib.checkpoint.decoding import Saving
from shardlib.checkpoint.fragments import Fragment
from shardlib.collectives import primitives
from shardlib.common.devices import pages, pins
from shardlib.errors import CheckpointError, RankFailure, listing
from shardlib.mesh.mesh import Mesh
from shardlib.mesh.transport import watch

_ALIGNMENT = 64  # bytes


class Snapshot:
    """Host memory for copies of fragments. It is allocated once and reused; pinned, where fragments lie on a GPU."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def take(self, fragments: Saving) -> tuple[list[Fragment], torch.Event | None]:
        """The fragments with copies of their data, and an event after which copies from a device are complete.

        The copies are the values at the time of the call, whatever happens to the originals afterwards. They overwrite those
        of the call before.
        """
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


# A checkpoint that a thread of each rank writes while training goes on.


PATIENCE = 60.0  # seconds that the last save waits for other ranks when the program has come to its end


class BackgroundSave:
    """A checkpoint that a thread of this rank writes.

    Attributes:
        problem: why it failed, or "".
    """

    def __init__(self, commit: Commit, mesh: Mesh, fragments: Sequence[Fragment], copied: torch.Event | None) -> None:
        self.mesh, self.step, self.problem = mesh, commit.step, ""
        self._failed: set[int] = set()  # other ranks, as far as is known
        self._commit, self._fragments, self._copied = commit, fragments, copied
        self._patience: float | None = None
        self.thread = threading.Thread(target=self._run, name=f"checkpoint of step {commit.step}")
        self.thread.start()

    def wait(self) -> None:
        """Wait until all ranks have written. Collective."""
        # Rank 0's thread ends when those of all ranks have. So it is waited for last; and it is told of failures, since a
        # disk that takes no file takes no report of that either.
        if self.mesh.rank != 0:
            self.thread.join()
        problems = self._problems()
        self._failed = {rank for rank, problem in enumerate(problems) if problem}
        self.thread.join()

    def check(self) -> None:
        """Raise CheckpointError on all ranks if the save failed on one. Collective."""
        problems = self._problems()
        if any(problems):
            raise CheckpointError(
                f"the checkpoint of step {self.step} was not written:\n{listing([each for each in problems if each])}\n"
                "The checkpoints before it are still there."
            )

    def _problems(self) -> list[str]:
        """The problem of each rank, or "". Collective."""
        return primitives.all_gather_object(self.mesh, list(self.mesh.shape), self.problem)

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
            raise RankFailure(
                f"rank {', '.join(map(str, failed))} has failed without a report in the checkpoint's folder"
            )
        if lost := sorted(watch.lost() & set(ranks)):
            raise RankFailure(f"rank {', '.join(map(str, lost))} no longer answers, and has not written its files")
        if threading.main_thread().is_alive():
            return
        if self._patience is None:
            self._patience = time.monotonic() + PATIENCE
        if time.monotonic() > self._patience:
            raise TimeoutError("other ranks have not written their files, and this program has come to its end")
