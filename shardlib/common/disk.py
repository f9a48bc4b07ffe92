"""Waiting for the disk and not waiting for it; folders and locks on it."""

import ctypes
import fcntl
import os
from pathlib import Path

BLOCK = 4096  # offsets and lengths of direct I/O are multiples of a disk's block, which is this at most
_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)  # Linux's; Python has no name for it
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


def locked(fd: int) -> bool:
    """Lock an open file or folder until it is closed or the process ends; False if another one holds the lock.

    On a file system without locks every caller gets one.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True
