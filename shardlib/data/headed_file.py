"""Files of arrays with a header: written once, complete or not there at all.

Layout: 8 bytes that say what the file is; the length of the header as a little-endian u64; the header, JSON padded with
spaces up to byte 4,096; the arrays.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from shardlib.common.disk import sync_folder

START = 4096  # the first array's byte
CHUNK = 1 << 20  # elements that are read at once where a whole array is


class FileKind(NamedTuple):
    """A kind of headed file: the bytes that it begins with, its name with an article, and the command that writes one."""

    magic: bytes
    name: str
    command: str


TOKENS = FileKind(b"SHARDTOK", "a token file", "shardlib tokenize")
INDEX = FileKind(b"SHARDIDX", "an index file", "shardlib analyze")


def kind_of(start: bytes) -> FileKind | None:
    """The kind of a file that begins so; None if it is no headed file. Whatever reads a file of another format asks first."""
    return next((kind for kind in (TOKENS, INDEX) if start.startswith(kind.magic)), None)


class NewFile:
    """A file that is being written, by `new_file`.

    Attributes:
        header: what it is to say, beside the checksum, which is ``blake2b``. Set by the writer.
    """

    def __init__(self, file: IO[bytes], kind: FileKind) -> None:
        self.header: dict[str, Any] = {}
        self._file, self._magic, self._digest = file, kind.magic, hashlib.blake2b(digest_size=16)
        file.write(b"\0" * START)

    def write(self, data: bytes) -> None:
        """Append bytes of an array."""
        self._file.write(data)
        self._digest.update(data)

    def align(self) -> None:
        """Go to the next multiple of 8 bytes, where an array may begin."""
        self._file.write(b"\0" * (-self._file.tell() % 8))

    def finish(self) -> None:
        """Write the header, and wait until all is on the disk.

        Raises:
            ValueError: the header is too long.
        """
        text = json.dumps({"version": 1} | self.header | {"blake2b": self._digest.hexdigest()}).encode()
        if len(text) > START - 16:
            raise ValueError(f"a header of {len(text)} bytes, and {START - 16} are the most")
        self._file.seek(0)
        self._file.write(self._magic + len(text).to_bytes(8, "little") + text.ljust(START - 16))
        self._file.flush()
        os.fsync(self._file.fileno())


@contextmanager
def new_file(path: Path, kind: FileKind) -> Iterator[NewFile]:
    """A file to write, which gets its name when the block ends and all of it is on the disk.

    So a crash leaves the old file, if there was one, or the new one; and so does an error in the block.
    """
    partial = path.with_name(f"{path.name}.partial")
    try:
        with open(partial, "wb") as file:
            made = NewFile(file, kind)
            yield made
            made.finish()
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def header_of(path: Path, kind: FileKind, error: type[Exception]) -> dict[str, Any]:
    """The header of a file of one kind; raises ``error`` for others.

    Raises:
        FileNotFoundError: there is no such file.
    """
    with open(path, "rb") as file:
        start = file.read(START)
    found, length = kind_of(start), int.from_bytes(start[8:16], "little")
    if found != kind or not 0 < length <= len(start) - 16:
        other = f" but {found.name}" if found and found != kind else ""
        raise error(f"{path} is not {kind.name}{other}; make one with {kind.command}")
    header = json.loads(start[16 : 16 + length])
    if header.get("version") != 1:
        raise error(f"{path} has format {header.get('version')}, and this shardlib reads 1: update shardlib")
    return header


def checksum_of(arrays: Iterable[np.ndarray]) -> str:
    """The checksum of a file that has these arrays, read a part at a time."""
    digest = hashlib.blake2b(digest_size=16)
    for array in arrays:
        for start in range(0, len(array), CHUNK):
            digest.update(array[start : start + CHUNK].tobytes())
    return digest.hexdigest()


def require_checksum(path: Path, arrays: Iterable[np.ndarray], said: str, error: type[Exception], remedy: str) -> None:
    """Raise ``error`` unless the arrays of a file have the checksum that its header says."""
    found = checksum_of(arrays)
    if found != said:
        raise error(f"{path} is damaged: its checksum is {found}, and its header says {said}; {remedy}")
