"""A rank's files in one or several folders: where each buffer lies, the header that says which step is whole, and locks.

    [ length, checksum, description as JSON | record | record ]      the header; each part padded to blocks

A commit writes the record that is not the newest, so that a crash in it leaves the other one. A record counts if its checksum
is right; the newest that counts is the step that the files hold. The header is made complete under another name, so that it
is there wholly or not at all.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import mmap
import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from shardlib.common.disk import BLOCK, locked, make_folder, sync_folder, whole_blocks
from shardlib.common.systems import LINUX, require_system
from shardlib.common.tensors import dtype_name
from shardlib.errors import StorageError, listing
from shardlib.sharded.disk import pool

_log = logging.getLogger("shardlib.disk")

FORMAT = 2
NOTES = 1 << 16  # bytes that a caller may add to a step, at most
ZEROS = 2  # in place of a slot: a buffer that was never written, which holds zeros
_KINDS = {True: "a state that was moved", False: "states of a running step"}
_TEXT = struct.Struct("<II")
_HEAD = struct.Struct("<8sqqI")
_MAGIC = b"shardrec"
_REMEDY = "Restore the run from a checkpoint and an empty folder"


class Flat(NamedTuple):
    """The number of elements and the dtype of a flat buffer."""

    numel: int
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def padded(self) -> int:
        """Bytes on the disk, and in the host memory that is read into."""
        return whole_blocks(self.bytes)


class Extent(NamedTuple):
    """A range of a buffer in one file: one request reads or writes it.

    Attributes:
        file: the file's number.
        offset: where the range begins in the file's first half; in the second it is as far from that half's beginning.
        start, length: the range's first byte in the buffer, and its bytes, padded.
    """

    file: int
    offset: int
    start: int
    length: int


@dataclass(frozen=True)
class FileLayout:
    """The places of named buffers in files. Every file has two halves, and every buffer a slot in both. (With one slot a file
    has the first half alone.)

    Attributes:
        buffers: name -> `Flat`.
        files: how many.
        request: bytes of a range. Each goes to the file that has least, so that files are read and written at once.
        durable: whether the files are for another run to take up.
        slots: copies of a buffer that there is room for.
    """

    rank: int
    ranks: int
    buffers: Mapping[str, Flat]
    files: int
    request: int
    durable: bool
    slots: int = 2

    @cached_property
    def extents(self) -> Mapping[str, tuple[Extent, ...]]:
        """Name -> the buffer's ranges, in order."""
        filled, extents = [0] * self.files, {}
        for name, flat in self.buffers.items():
            ranges = []
            for start in range(0, flat.padded, self.request):
                file, length = filled.index(min(filled)), min(self.request, flat.padded - start)
                ranges.append(Extent(file, filled[file], start, length))
                filled[file] += length
            extents[name] = tuple(ranges)
        return extents

    @cached_property
    def halves(self) -> tuple[int, ...]:
        """The bytes of half of each file."""
        halves = [0] * self.files
        for extent in (extent for extents in self.extents.values() for extent in extents):
            halves[extent.file] += extent.length
        return tuple(halves)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self.slots * half for half in self.halves)

    @property
    def stem(self) -> str:
        """What files are named by: the rank, and a hash of what they hold."""
        content = json.dumps(self.description() | {"request": 0}, sort_keys=True)
        return f"rank-{self.rank}-of-{self.ranks}-{hashlib.blake2b(content.encode(), digest_size=6).hexdigest()}"

    def description(self) -> dict[str, Any]:
        """What the header says, for JSON."""
        return {
            "format": FORMAT,
            "rank": self.rank,
            "ranks": self.ranks,
            "files": self.files,
            "request": self.request,
            "durable": self.durable,
            "buffers": {name: [flat.numel, dtype_name(flat.dtype)] for name, flat in self.buffers.items()},
        }

    def differences(self, found: Mapping[str, Any]) -> list[str]:
        """What a folder's description says otherwise than this layout, a line each."""
        mine = self.description()
        if found.get("format") != FORMAT:
            return [f"format {found.get('format')}, here {FORMAT}"]
        lines = [
            f"{found[key]} {word}, here {mine[key]}"
            for key, word in (("ranks", "ranks"), ("files", "folders"))
            if found[key] != mine[key]
        ]
        if found["durable"] != self.durable:
            lines.append(f"{_KINDS[found['durable']]}, here {_KINDS[self.durable]}")
        theirs, ours = found["buffers"], mine["buffers"]
        for name in sorted(theirs.keys() | ours.keys()):
            if theirs.get(name) != ours.get(name):
                lines.append(f"{name}: {_described(theirs.get(name))}, here {_described(ours.get(name))}")
        return lines or ["the order of its buffers"]


def _described(flat: list[Any] | None) -> str:
    return "absent" if flat is None else f"{flat[0]:,} × {flat[1]}"


@dataclass(frozen=True)
class StepRecord:
    """One step of all buffers.

    Attributes:
        sequence: the number of the commit.
        step: the caller's number; None before anything was committed.
        notes: what the caller keeps beside the buffers.
        slots: name -> the slot that holds the buffer, 0 or 1, or `ZEROS`.
        sums: name -> CRC-32 of each of its ranges, uint32.
    """

    sequence: int
    step: int | None
    notes: bytes
    slots: Mapping[str, int]
    sums: Mapping[str, np.ndarray]

    @classmethod
    def first(cls, layout: FileLayout) -> StepRecord:
        """The record before the first commit."""
        sums = {name: np.zeros(len(extents), np.uint32) for name, extents in layout.extents.items()}
        return cls(0, None, b"", dict.fromkeys(layout.buffers, ZEROS), sums)

    def packed(self) -> bytes:
        step = -1 if self.step is None else self.step
        parts = [_HEAD.pack(_MAGIC, self.sequence, step, len(self.notes)), bytes(self.slots.values())]
        parts += [sums.astype("<u4").tobytes() for sums in self.sums.values()]
        content = b"".join((*parts, self.notes))
        return content + _crc(content)

    @classmethod
    def unpacked(cls, content: bytes, layout: FileLayout) -> StepRecord | None:
        """The record in an area of the header; None if its checksum is wrong."""
        magic, sequence, step, length = _HEAD.unpack_from(content)
        at, counts = _HEAD.size, [len(extents) for extents in layout.extents.values()]
        numbers, total = len(layout.buffers), sum(counts)
        end = at + numbers + 4 * total + length
        if magic != _MAGIC or end + 4 > len(content) or content[end : end + 4] != _crc(content[:end]):
            return None
        slots = dict(zip(layout.buffers, content[at : at + numbers], strict=True))
        packed = np.frombuffer(content, "<u4", total, at + numbers).astype(np.uint32)
        sums = dict(zip(layout.buffers, np.split(packed, np.cumsum(counts)[:-1]), strict=False))
        return cls(sequence, None if step < 0 else step, content[end - length : end], slots, sums)


def _crc(content: bytes) -> bytes:
    return struct.pack("<I", zlib.crc32(content))


class Header:
    """The open header of a rank's files."""

    records: list[StepRecord]

    def __init__(self, path: Path, layout: FileLayout) -> None:
        self._path = path
        text = json.dumps(layout.description()).encode()
        self._begin = whole_blocks(_TEXT.size + len(text))
        empty = StepRecord.first(layout).packed()
        self._size = whole_blocks(len(empty) + NOTES)
        if not path.exists():
            head = (_TEXT.pack(len(text), zlib.crc32(text)) + text).ljust(self._begin, b"\0")
            _create(path, head + empty.ljust(self._size, b"\0") + bytes(self._size))
        self._fd = os.open(path, os.O_RDWR)
        try:
            self._read(layout)
        except BaseException:
            self.close()
            raise

    def _read(self, layout: FileLayout) -> None:
        """Find the records."""
        content, path = os.pread(self._fd, self._begin + 2 * self._size, 0), self._path
        areas = [content[self._begin + i * self._size :][: self._size].ljust(_HEAD.size, b"\0") for i in range(2)]
        found = [StepRecord.unpacked(area, layout) for area in areas]
        self.records = sorted((record for record in found if record), key=lambda record: -record.sequence)
        if not self.records:
            raise StorageError(f"{path} is damaged: neither of its records can be read. {_REMEDY}")
        if any(record is None and area.strip(b"\0") for record, area in zip(found, areas, strict=True)):
            _log.warning(
                "%s: one of two records cannot be read, as after a crash in a commit: step %s is the newest that is whole",
                path,
                self.records[0].step,
            )
        self.write(self.records[0])  # what was read may not be on the disk yet

    def write(self, record: StepRecord) -> None:
        """Make a record the newest: it is on the disk when this returns."""
        self._put(record.sequence, record.packed())
        self.records = [record, *(old for old in self.records if old.sequence < record.sequence)][:2]

    def forget_newest(self) -> None:
        """Make the older of two records the newest."""
        del self.records[0]
        self.settle()

    def settle(self) -> None:
        """Make the newest record the only one on the disk, where a failed write or the step before may have left another."""
        self._put(self.records[0].sequence + 1, b"")
        del self.records[1:]

    def _put(self, sequence: int, content: bytes) -> None:
        """Write the area of a commit, and wait until it is on the disk."""
        area = memoryview(content.ljust(self._size, b"\0"))
        pool.write(self._fd, area, self._begin + sequence % 2 * self._size, "the header", self._path)
        with pool.failing(f"syncing {self._path}"):
            os.fdatasync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


def _create(path: Path, content: bytes) -> None:
    """Make a file with this content, wholly or not at all."""
    partial = path.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        pool.write(fd, memoryview(content), 0, "the header", path)
        os.fsync(fd)
    finally:
        os.close(fd)
    os.rename(partial, path)
    sync_folder(path.parent)


class Files:
    """The open data files and the header of one rank. One process at a time holds them.

    Files that a dead run has left are taken up if they hold the same buffers; data files without a header are of a run that
    died while it made them, and are made anew.

    Args:
        folders: one for each data file; the header is in the first.
        layout: the places of buffers. Files that exist keep the size of requests that they were made with.

    Raises:
        UnsupportedError: the system is not Linux.
        StorageError: the folders are in use, hold other buffers, cannot be written to or have too little space.
    """

    def __init__(self, folders: Sequence[Path], layout: FileLayout) -> None:
        require_system("offload to disk", LINUX)
        self._closing = contextlib.ExitStack()
        with self._closing:  # of what was opened, unless all is
            for folder in folders:
                with pool.failing(f"making {folder}"):
                    make_folder(folder)
                self._lock(folder, layout)
            found = _recognised(folders[0], layout)
            if found is not None:
                layout = replace(layout, request=found["request"])
            self.layout = layout
            self.paths: list[Path] = [
                folder / f"{layout.stem}.{number + 1}of{layout.files}.data" for number, folder in enumerate(folders)
            ]
            if found is None:
                copies = "two copies" if layout.slots > 1 else "one copy"
                for path, size in zip(self.paths, layout.sizes, strict=True):
                    with pool.failing(f"making {path}, of {size:,} bytes for {copies} of every buffer"):
                        _reserve(path, size)
            self.fds: list[int] = []
            self.direct: list[bool] = []
            for path in self.paths:
                with pool.failing(f"opening {path}"):
                    fd, direct = _opened(path)
                self._closing.callback(os.close, fd)
                self.fds.append(fd)
                self.direct.append(direct)
            self.check()
            with pool.failing(f"opening {folders[0] / layout.stem}.header"):
                self.header: Header = Header(folders[0] / f"{layout.stem}.header", layout)
            self._closing.callback(self.header.close)
            self._closing = self._closing.pop_all()

    def _lock(self, folder: Path, layout: FileLayout) -> None:
        path = folder / f"rank-{layout.rank}.lock"
        with pool.failing(f"opening {path}"):
            lock = locked(path, os.O_RDWR | os.O_CREAT)
        if lock is None:
            raise StorageError(
                f"{folder} is in use: another run or a state of this process holds {path.name}. Name another folder, "
                "or save a checkpoint and del state and step"
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
            raise StorageError(f"files in use were changed from outside:\n{listing(problems)}\n{_REMEDY}")

    def sync(self, number: int) -> None:
        """Wait until what was written to a file is on the disk."""
        with pool.failing(f"syncing {self.paths[number]}"):
            os.fdatasync(self.fds[number])

    def close(self) -> None:
        """Close the files, for another run to open."""
        self._closing.close()


def _recognised(folder: Path, layout: FileLayout) -> dict[str, Any] | None:
    """The description of this rank's files in a folder; None if there are none.

    Raises:
        StorageError: the folder holds files of another layout, number of ranks or format, or a header cannot be read.
    """
    for path in sorted(folder.glob("rank-*.header")):
        content = path.read_bytes()
        length, checksum = _TEXT.unpack_from(content.ljust(_TEXT.size, b"\0"))
        text = content[_TEXT.size :][:length]
        if not text or zlib.crc32(text) != checksum:
            raise StorageError(f"{path} is damaged: what it says of its files cannot be read. {_REMEDY}")
        found = json.loads(text)
        if path.stem == layout.stem:
            return found
        if found["rank"] == layout.rank or found["ranks"] != layout.ranks:
            raise StorageError(
                f"{folder} holds buffers of another run ({path.name}), which "
                f"differ:\n{listing(layout.differences(found))}\nUse its plan, another folder, or remove these files"
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
