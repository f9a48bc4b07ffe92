"""Host memory that disks are read into and written from: bounded, reused, aligned to pages."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from pathlib import Path

import torch

from shardlib.common.devices import pages, settle
from shardlib.common.disk import BLOCK
from shardlib.common.environment import timed
from shardlib.errors import StorageError


class Pool:
    """Blocks of host memory, of ``limit`` bytes together at most.

    A block is *lent* until it is given back, or *sent*: then it will come back by itself. `take` waits for blocks that were
    sent, which is what holds a writer back that is quicker than its disk. Blocks are used again once there are as many as the
    limit allows, so that what is held does not depend on how quick the disk is.

    Args:
        limit: bytes of all blocks.
        pinned: whether an accelerator copies from and to the blocks beside other work.
    """

    def __init__(self, limit: int, pinned: bool) -> None:
        self._limit, self._pinned = limit, pinned
        self._changed = threading.Condition()
        self._lent: dict[int, torch.Tensor] = {}
        self._sent: dict[int, torch.Tensor] = {}
        self._idle: list[torch.Tensor] = []

    def take(self, size: int) -> torch.Tensor:
        """A block of ``size`` bytes, lent. Waits until it fits.

        Raises:
            StorageError: nothing is on its way back.
        """
        with self._changed:
            while not self._fits(size):
                if not self._sent:
                    held = sum(block.numel() for block in self._lent.values())
                    raise StorageError(
                        f"a buffer needs {size:,} bytes of host memory, and {held:,} of {self._limit:,} are lent: "
                        "write or release some"
                    )
                self._changed.wait()
            return self._new(size)

    def room(self, sizes: list[int]) -> bool:
        """Whether blocks of these sizes can be taken now, without waiting."""
        with self._changed:
            return self._fits(sum(sizes))

    def lent(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The lent block that a tensor begins at; None if it lies elsewhere."""
        with self._changed:
            return self._lent.get(tensor.data_ptr())

    def send(self, block: torch.Tensor) -> None:
        """Announce that a lent block will be given back by another thread."""
        with self._changed:
            self._sent[block.data_ptr()] = self._lent.pop(block.data_ptr())

    def give(self, block: torch.Tensor) -> None:
        """Give back a block that was lent or sent."""
        with self._changed:
            self._idle.append((self._lent if block.data_ptr() in self._lent else self._sent).pop(block.data_ptr()))
            self._changed.notify_all()

    def give_back(self) -> None:
        """Free the blocks that are neither lent nor sent."""
        with self._changed:
            self._idle = []

    def _fits(self, size: int) -> bool:
        held = sum(block.numel() for blocks in (self._lent, self._sent) for block in blocks.values())
        return held + size <= self._limit

    def _new(self, size: int) -> torch.Tensor:
        known = (self._lent.values(), self._sent.values(), self._idle)
        free = self._limit - sum(block.numel() for blocks in known for block in blocks)
        block = None if size <= free else next((idle for idle in self._idle if idle.numel() == size), None)
        if block is not None:
            self._idle = [idle for idle in self._idle if idle is not block]
        else:
            while self._idle and size > free:
                settle(self._idle[0])  # which came back when its copies had ended
                free += self._idle.pop(0).numel()
            block = pages(size, self._pinned)
        self._lent[block.data_ptr()] = block
        return block


# What is under way between host memory and files.


class PendingRead:
    """A buffer that is being read."""

    def __init__(
        self, pool: Pool, block: torch.Tensor, numel: int, dtype: torch.dtype, pending: Sequence[Future[None]]
    ) -> None:
        self._pool, self._block, self._numel, self._dtype, self._pending = pool, block, numel, dtype, pending
        self._held = True

    def result(self) -> torch.Tensor:
        """The buffer, in memory that is lent; waits for it.

        Raises:
            StorageError: it could not be read; the memory is given back.
        """
        try:
            with timed("wait", "disk"):
                wait(self._pending)
            for request in self._pending:
                request.result()
        except BaseException:
            self.cancel()
            raise
        if not self._numel:  # an empty tensor has no address that it could be recognised by
            self.cancel()
            return torch.empty(0, dtype=self._dtype)
        return self._block[: self._numel * self._dtype.itemsize].view(self._dtype)

    def cancel(self) -> None:
        """Give back the memory, of the result too. A second call does nothing."""
        wait(self._pending)
        if self._held:
            self._held = False
            self._pool.give(self._block)


class Write:
    """A buffer that is being written, whose memory is given back when the last of its requests is done."""

    block: torch.Tensor

    def __init__(self, pool: Pool, block: torch.Tensor, requests: int) -> None:
        self._pool, self.block, self._left = pool, block, requests
        self._lock = threading.Lock()

    def done(self) -> None:
        """Count a request that is done, or has failed."""
        with self._lock:
            self._left -= 1
            last = not self._left
        if last:
            self._pool.give(self.block)


# Reads and writes of ranges of files, complete or with an error that says where and why.


_REMEDIES = {
    errno.ENOSPC: "Free space there, or name further folders on other disks",
    errno.EDQUOT: "Raise the quota, or name further folders elsewhere",
    errno.EIO: "The disk or the way to it fails: look into the system's log, and use another disk",
    errno.EROFS: "Name a folder on a file system that can be written to",
    errno.EACCES: "Name a folder that this process may read and write",
    errno.EPERM: "Name a folder that this process may read and write",
    errno.EMFILE: "Raise the limit of open files (ulimit -n)",
    errno.ENOENT: "Do not move or remove files that are in use; name the folders in the order they were first named in",
}


@contextlib.contextmanager
def failing(doing: str) -> Iterator[None]:
    """A context in which what the system refuses is a `StorageError` that says what was done, and what helps."""
    try:
        yield
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, "Look into the system's log, or use another folder")
        raise StorageError(f"{doing}: [Errno {error.errno}] {error.strerror}. {remedy}") from error


def read(fd: int, view: memoryview, offset: int, what: str, path: Path) -> None:
    """Fill ``view`` from a file; ``what`` names the buffer. Raises `StorageError`, also where the file ends before."""
    _whole(os.preadv, fd, view, offset, f"reading {what}", path)


def write(fd: int, view: memoryview, offset: int, what: str, path: Path) -> None:
    """Write all of ``view`` to a file. Raises `StorageError`, also where a part is written alone."""
    _whole(os.pwritev, fd, view, offset, f"writing {what}", path)


def _whole(
    call: Callable[[int, list[memoryview], int], int], fd: int, view: memoryview, offset: int, doing: str, path: Path
) -> None:
    """Call until all is done; direct I/O goes on at whole blocks alone."""
    done, idle = 0, 0
    doing = f"{doing} at bytes {offset:,} to {offset + len(view):,} of {path}"
    while done < len(view):
        with failing(doing):
            moved = call(fd, [view[done:]], offset + done)
        if moved == len(view) - done:
            return
        done += moved // BLOCK * BLOCK
        idle = 0 if moved >= BLOCK else idle + 1
        if idle > 1:  # the same again: the file ends here
            raise StorageError(
                f"{doing}: {done + moved:,} of {len(view):,} bytes, then no more. The file was cut, or its disk fails"
            )
