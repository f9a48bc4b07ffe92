"""Reads and writes of ranges of files, complete or with an error that says where and why."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

from shardlib.common.disk import BLOCK
from shardlib.errors import StorageError

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


def failure(doing: str, error: OSError) -> StorageError:
    """What the system refused, and what helps."""
    remedy = _REMEDIES.get(error.errno or 0, "Look into the system's log, or use another folder")
    return StorageError(f"{doing}: [Errno {error.errno}] {error.strerror}. {remedy}")


def read(fd: int, view: memoryview, offset: int, what: str, path: Path) -> None:
    """Fill ``view`` from a file; ``what`` names the buffer.

    Raises:
        StorageError: the system refuses, or the file ends before.
    """
    _whole(os.preadv, fd, view, offset, f"reading {what}", path)


def write(fd: int, view: memoryview, offset: int, what: str, path: Path) -> None:
    """Write all of ``view`` to a file.

    Raises:
        StorageError: the system refuses, or takes a part only.
    """
    _whole(os.pwritev, fd, view, offset, f"writing {what}", path)


def _whole(
    call: Callable[[int, list[memoryview], int], int], fd: int, view: memoryview, offset: int, doing: str, path: Path
) -> None:
    """Call until all is done; direct I/O goes on at whole blocks alone."""
    done, idle = 0, 0
    doing = f"{doing} at bytes {offset:,} to {offset + len(view):,} of {path}"
    while done < len(view):
        try:
            moved = call(fd, [view[done:]], offset + done)
        except OSError as error:
            raise failure(doing, error) from error
        if moved == len(view) - done:
            return
        done += moved // BLOCK * BLOCK
        idle = 0 if moved >= BLOCK else idle + 1
        if idle > 1:  # the same again: the file ends here
            raise StorageError(
                f"{doing}: {done + moved:,} of {len(view):,} bytes, then no more. The file was cut or is on a disk that "
                "fails; leave files alone while they are in use"
            )
