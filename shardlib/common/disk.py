"""Waiting for the disk."""

import os
from pathlib import Path


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk: a rename alone may be lost in a crash."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
