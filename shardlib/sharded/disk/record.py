"""The header of a rank's files: what they hold, and which step of it is whole.

    [ length, checksum, description as JSON | record | record ]      each part padded to blocks

A commit writes the record that is not the newest, so that a crash in it leaves the other one. A record counts if its checksum
is right; the newest that counts is the step that the files hold. The header is made complete under another name, so that it
is there wholly or not at all.
"""

from __future__ import annotations

import json
import logging
import os
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardlib.common.disk import sync_folder, whole_blocks
from shardlib.errors import StorageError
from shardlib.sharded.disk import pool
from shardlib.sharded.disk.layout import FileLayout

_log = logging.getLogger("shardlib.disk")

ZEROS = 2  # in place of a slot: a buffer that was never written, which holds zeros
NOTES = 1 << 16  # bytes that a caller may add to a step, at most
_TEXT = struct.Struct("<II")
_HEAD = struct.Struct("<8sqqI")
_MAGIC = b"shardrec"
_REMEDY = "Restore the run from a checkpoint and an empty folder"


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
        return content + struct.pack("<I", zlib.crc32(content))


def _unpacked(content: bytes, layout: FileLayout) -> StepRecord | None:
    """The record in an area of the header; None if its checksum is wrong."""
    magic, sequence, step, length = _HEAD.unpack_from(content)
    at = _HEAD.size
    numbers, total = len(layout.buffers), sum(map(len, layout.extents.values()))
    end = at + numbers + 4 * total + length
    if magic != _MAGIC or end + 4 > len(content) or content[end : end + 4] != _crc(content[:end]):
        return None
    slots = dict(zip(layout.buffers, content[at : at + numbers], strict=True))
    packed = np.frombuffer(content, "<u4", total, at + numbers).astype(np.uint32)
    sums, begun = {}, 0
    for name, extents in layout.extents.items():
        sums[name] = packed[begun : begun + len(extents)].copy()
        begun += len(extents)
    return StepRecord(sequence, None if step < 0 else step, content[end - length : end], slots, sums)


def _crc(content: bytes) -> bytes:
    return struct.pack("<I", zlib.crc32(content))


class Header:
    """The open header of a rank's files."""

    def __init__(self, path: Path, layout: FileLayout) -> None:
        self._path = path
        text = json.dumps(layout.description()).encode()
        self._begin = whole_blocks(_TEXT.size + len(text))
        empty = StepRecord.first(layout)
        self._size = whole_blocks(len(empty.packed()) + NOTES)
        if not path.exists():
            head = (_TEXT.pack(len(text), zlib.crc32(text)) + text).ljust(self._begin, b"\0")
            _create(path, head + empty.packed().ljust(self._size, b"\0") + bytes(self._size))
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
        found = [_unpacked(area, layout) for area in areas]
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
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            raise pool.failure(f"syncing {self._path}", error) from error

    def close(self) -> None:
        os.close(self._fd)


def described(path: Path) -> dict[str, Any]:
    """The description in a header.

    Raises:
        StorageError: it cannot be read.
    """
    content = path.read_bytes()
    if len(content) >= _TEXT.size:
        length, checksum = _TEXT.unpack_from(content)
        text = content[_TEXT.size :][:length]
        if zlib.crc32(text) == checksum and text:
            return json.loads(text)
    raise StorageError(f"{path} is damaged: what it says of its files cannot be read. {_REMEDY}")


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
