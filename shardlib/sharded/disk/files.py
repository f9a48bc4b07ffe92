"""A rank's files in one or several folders: made, recognised or refused, locked, and opened for direct I/O."""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from shardlib.common.disk import BLOCK, locked, make_folder, sync_folder
from shardlib.errors import StorageError, listing
from shardlib.sharded.disk import pool, record
from shardlib.sharded.disk.layout import FileLayout

_log = logging.getLogger("shardlib.disk")


class Files:
    """The open data files and the header of one rank. One process at a time holds them.

    Files that a dead run has left are taken up if they hold the same buffers; data files without a header are of a run that
    died while it made them, and are made anew.

    Args:
        folders: one for each data file; the header is in the first.
        layout: the places of buffers. Files that exist keep the size of requests that they were made with.

    Raises:
        StorageError: the folders are in use, hold other buffers, cannot be written to or have too little space.
    """

    def __init__(self, folders: Sequence[Path], layout: FileLayout) -> None:
        self._closing = contextlib.ExitStack()
        with self._closing:  # of what was opened, unless all is
            for folder in folders:
                with _said(f"making {folder}"):
                    make_folder(folder)
                self._lock(folder, layout)
            found = _recognised(folders[0], layout)
            if found is not None:
                layout = FileLayout(
                    layout.rank,
                    layout.ranks,
                    layout.buffers,
                    layout.files,
                    found["request"],
                    layout.durable,
                    layout.slots,
                )
            self.layout = layout
            self.paths = [
                folder / f"{layout.stem}.{number + 1}of{layout.files}.data" for number, folder in enumerate(folders)
            ]
            if found is None:
                copies = "two copies" if layout.slots > 1 else "one copy"
                for path, size in zip(self.paths, layout.sizes, strict=True):
                    with _said(f"making {path}, of {size:,} bytes for {copies} of every buffer"):
                        _reserve(path, size)
            self.fds, self.direct = [], []
            for path in self.paths:
                with _said(f"opening {path}"):
                    fd, direct = _opened(path)
                self._closing.callback(os.close, fd)
                self.fds.append(fd)
                self.direct.append(direct)
            self.check()
            with _said(f"opening {folders[0] / layout.stem}.header"):
                self.header = record.Header(folders[0] / f"{layout.stem}.header", layout)
            self._closing.callback(self.header.close)
            self._closing = self._closing.pop_all()

    def _lock(self, folder: Path, layout: FileLayout) -> None:
        path = folder / f"rank-{layout.rank}.lock"
        with _said(f"opening {path}"):
            lock = locked(path, os.O_RDWR | os.O_CREAT)
        if lock is None:
            raise StorageError(
                f"{folder} is in use: another run on this host, or another state of this process, holds {path.name}: what "
                "was made earlier is kept by variables, a train step, or the last traceback (in a notebook "
                "sys.last_value = sys.last_traceback = None drops it). "
                "Give each a folder of its own, or end the other one. To go on with a state in another train step, save a "
                "checkpoint of it, drop the state and its step (del), make the new step, and restore the checkpoint"
            )
        self._closing.callback(lock.close)

    def check(self) -> None:
        """See that the files are still there, and whole.

        Raises:
            StorageError: some are not; lists them.
        """
        problems = []
        for path, fd, size in zip(self.paths, self.fds, self.layout.sizes, strict=True):
            found = os.fstat(fd).st_size
            if found < size:
                problems.append(f"{path} was cut to {found:,} of {size:,} bytes")
            elif not path.exists() or os.stat(path).st_ino != os.fstat(fd).st_ino:
                problems.append(f"{path} was removed or replaced")
        if problems:
            raise StorageError(
                f"files of buffers on disk were changed from outside:\n{listing(problems)}\n"
                "Leave them alone while a run uses them; restore this run from a checkpoint and an empty folder"
            )

    def sync(self, number: int) -> None:
        """Wait until what was written to a file is on the disk."""
        try:
            os.fdatasync(self.fds[number])
        except OSError as error:
            raise pool.failure(f"syncing {self.paths[number]}", error) from error

    def close(self) -> None:
        """Close the files, for another run to open."""
        self._closing.close()


@contextlib.contextmanager
def _said(doing: str) -> Iterator[None]:
    """A context whose errors of the system say what was done."""
    try:
        yield
    except OSError as error:
        raise pool.failure(doing, error) from error


def _recognised(folder: Path, layout: FileLayout) -> dict[str, Any] | None:
    """The description of this rank's files in a folder; None if there are none.

    Raises:
        StorageError: the folder holds files of another layout, number of ranks or format.
    """
    for path in sorted(folder.glob("rank-*.header")):
        found = record.described(path)
        if path.stem == layout.stem:
            return found
        if found["rank"] == layout.rank or found["ranks"] != layout.ranks:
            raise StorageError(
                f"{folder} holds buffers of another run ({path.name}), which differ:\n{listing(layout.differences(found))}\n"
                "Go on with the plan that made them, name another folder, or remove these files"
            )
    return None


def _reserve(path: Path, size: int) -> None:
    """Make a file of a size that its disk has room for: a disk that is full later refuses nothing."""
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        os.posix_fallocate(fd, 0, max(size, BLOCK))
        os.fsync(fd)
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(fd)
    sync_folder(path.parent)


def _opened(path: Path) -> tuple[int, bool]:
    """The descriptor of an open file, and whether its I/O is direct."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    else:
        try:
            os.preadv(fd, [mmap.mmap(-1, BLOCK)], 0)
            return fd, True
        except OSError as error:
            os.close(fd)
            if error.errno != errno.EINVAL:
                raise
    _say_plain(path.parent)
    return os.open(path, os.O_RDWR), False


@cache
def _say_plain(folder: Path) -> None:
    _log.warning("%s: its file system has no direct I/O, so buffers on disk pass through the system's cache", folder)
