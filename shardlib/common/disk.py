"""Waiting for the disk and not waiting for it; folders and locks on it."""

import ctypes
import os
import sys
import weakref
from pathlib import Path

from shardlib.common.systems import LINUX, MACOS, require_system

if sys.platform != "win32":
    import fcntl

BLOCK = 4096  # offsets and lengths of direct I/O are multiples of a disk's block, which is this at most
# Linux's; Python has no name for it.
_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None) if sys.platform == LINUX else None
_BEGIN = 2  # SYNC_FILE_RANGE_WRITE


def whole_blocks(size: int) -> int:
    """``size`` bytes, padded to blocks."""
    return -(-size // BLOCK) * BLOCK


def begin_writing(fd: int, offset: int, length: int) -> None:
    """Let the disk begin to write a range of a file, without waiting, so that a later fsync has little left to wait for.

    A hint: it promises nothing, and systems without the call do nothing.
    """
    if _sync_file_range is not None:
        _sync_file_range(fd, ctypes.c_int64(offset), ctypes.c_int64(length), _BEGIN)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk: a rename alone may be lost in a crash."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, on the disk."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        sync_folder(path.parent)


class Lock:
    """A lock on a file or a folder, held until `close` or the end of the process. A forked child does not hold it."""

    def __init__(self, fd: int) -> None:
        self._fd: int | None = fd
        _held.add(self)

    def close(self) -> None:
        """Let go of the lock. A second call does nothing."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)


_held: weakref.WeakSet[Lock] = weakref.WeakSet()


def _let_go() -> None:
    """Close a child's descriptors of locks, which are held as long as any process has one open."""
    for lock in list(_held):
        lock.close()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_let_go)


def locked(path: Path, flags: int) -> Lock | None:
    """A lock on a file or a folder; None if another one holds it. On a file system without locks every caller gets one.

    Args:
        flags: of the call that opens it.

    Raises:
        UnsupportedError: on Windows.
    """
    require_system(f"a lock on {path}", LINUX, MACOS)
    fd = os.open(path, flags, 0o666)
    lock = Lock(fd)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    except OSError:
        pass
    return lock
