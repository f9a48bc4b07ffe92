"""Waiting for the disk, and not waiting for it."""

import ctypes
import os
from pathlib import Path

_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)  # Linux's; Python has no name for it
_BEGIN = 2  # SYNC_FILE_RANGE_WRITE


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
