"""Writing one rank's file of a checkpoint: items one after the other, with their checksums.

An item is a chunk of a tensor in the bytes that `torch.save` would write, which `torch.distributed.checkpoint` reads: an
uncompressed zip file of a pickle that describes a tensor, and of its elements. All but the elements follows from dtype and
sizes, so an item is written as head, elements, tail, without a copy of the elements.
"""

from __future__ import annotations

import functools
import math
import os
import struct
import sys
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shardlib.checkpoint.fragments import Fragment
from shardlib.checkpoint.manifest import Chunk, Entry
from shardlib.common._compat import pickled_tensor
from shardlib.common.disk import begin_writing
from shardlib.common.tensors import dtype_name, raw_bytes
from shardlib.common.thresholds import Threshold

# Bytes of an item at most: far below 4 GiB, from which on zip files need another form.
_LARGEST = Threshold(1 << 26)
_BUFFERS, _BATCH = 512, Threshold(1 << 25)  # of one system call: Linux takes 1,024 buffers and 2 GiB
ALIGNMENT = 64  # bytes: the elements of an item begin at a multiple in the file
_ROOT = "item"  # torch takes the first folder of a zip file, whatever its name, for the root
_LOCAL, _ENTRY, _END = struct.Struct("<4s5H3L2H"), struct.Struct("<4s6H3L5H2L"), struct.Struct("<4s4H2LH")
_PADDING = struct.Struct("<2s1H")  # an extra field, which zip files may have for any purpose


class Written(NamedTuple):
    """What a rank wrote: its file's bytes, and the chunks of each tensor."""

    bytes: int
    tensors: dict[str, Entry]


class _Item(NamedTuple):
    fragment: Fragment
    chunk: Chunk
    head: bytes
    elements: torch.Tensor
    tail: bytes

    def buffers(self) -> list[bytes | memoryview]:
        host = self.elements.cpu() if self.elements.device.type != "cpu" else self.elements
        return [self.head, bytes_of(host), self.tail]


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    array: Any = raw_bytes(tensor).numpy()
    return memoryview(array)


def write(path: Path, fragments: Iterable[Fragment]) -> Written:
    """Write fragments to a new file and wait until they are on the disk.

    The fragments' data are flat; those on a device are copied to the host, two batches of items at most at a time.
    """
    tensors: dict[str, Entry] = {}
    size = 0
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with ThreadPoolExecutor(1) as pool:  # checksums are taken while the disk is written
            pending: deque[tuple[list[_Item], Future[list[int]]]] = deque()
            for batch in _batches(_laid_out(path.name, fragments)):
                buffers = [buffer for item in batch for buffer in item.buffers()]
                pending.append((batch, pool.submit(_checksums, buffers)))
                written = write_all(fd, buffers, size)
                begin_writing(fd, size, written)
                size += written
                while len(pending) > 1:  # more would keep more copies from a device
                    _record(tensors, *pending.popleft())
            while pending:
                _record(tensors, *pending.popleft())
        os.fsync(fd)
    finally:
        os.close(fd)
    return Written(size, tensors)


def _laid_out(file: str, fragments: Iterable[Fragment]) -> Iterator[_Item]:
    """The items of a file, in order."""
    offset = 0
    for fragment in fragments:
        dtype = fragment.data.dtype
        for part in fragment.parts(max(1, _LARGEST() // dtype.itemsize)):
            for box, elements in part.boxes():
                head, tail = frame(dtype, box.sizes, offset)
                length = len(head) + box.numel * dtype.itemsize + len(tail)
                chunk = Chunk(file, offset, length, offset + len(head), 0, box.first, box.sizes)
                yield _Item(fragment, chunk, head, elements, tail)
                offset += length


def _batches(laid_out: Iterable[_Item]) -> Iterator[list[_Item]]:
    batch: list[_Item] = []
    size = 0
    for item in laid_out:
        if batch and (size + item.chunk.length > _BATCH() or 3 * len(batch) >= _BUFFERS):
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += item.chunk.length
    if batch:
        yield batch


def _checksums(buffers: Sequence[bytes | memoryview]) -> list[int]:
    """One CRC-32 for each head, elements and tail."""
    return [
        zlib.crc32(tail, zlib.crc32(elements, zlib.crc32(head)))
        for head, elements, tail in zip(buffers[::3], buffers[1::3], buffers[2::3], strict=True)
    ]


def _record(tensors: dict[str, Entry], batch: Sequence[_Item], checksums: Future[list[int]]) -> None:
    """Add a batch's chunks to their tensors."""
    for item, checksum in zip(batch, checksums.result(), strict=True):
        name, _, data, window = item.fragment
        entry = tensors.setdefault(name, Entry(dtype_name(data.dtype), window.shape))
        entry.chunks.append(item.chunk._replace(checksum=checksum))


def write_all(fd: int, buffers: Sequence[bytes | memoryview], offset: int) -> int:
    """Write buffers one after the other from ``offset`` on; returns their bytes."""
    left = [view for view in (memoryview(buffer) for buffer in buffers) if view.nbytes]
    total = sum(view.nbytes for view in left)
    while left:
        done = os.pwritev(fd, left, offset)
        offset += done
        while left and done >= left[0].nbytes:
            done -= left.pop(0).nbytes
        if done:
            left[0] = left[0][done:]
    return total


def frame(dtype: torch.dtype, sizes: tuple[int, ...], offset: int) -> tuple[bytes, bytes]:
    """The bytes before and after the elements of an item that begins at ``offset`` in its file.

    Zip files have a checksum per entry, which torch neither needs nor looks at; it stays 0 here, as under
    ``torch.serialization.set_crc32_options(False)``.
    """
    start, entries = _start(dtype, sizes)
    length = dtype.itemsize * math.prod(sizes)
    name = f"{_ROOT}/data/0".encode()
    plain = len(start) + _LOCAL.size + len(name) + _PADDING.size
    padding = -(offset + plain) % ALIGNMENT
    extra = _PADDING.pack(b"FB", padding) + bytes(padding)
    head = start + _local(name, length, extra)
    last = _directory_entry(name, length, len(start))
    directory = entries + last
    tail = directory + _END.pack(b"PK\5\6", 0, 0, 4, 4, len(directory), len(head) + length, 0)
    return head, tail


@functools.lru_cache(maxsize=4096)
def _start(dtype: torch.dtype, sizes: tuple[int, ...]) -> tuple[bytes, bytes]:
    """The entries before the elements, and their part of the zip file's directory."""
    start, directory = b"", b""
    for name, content in (
        ("data.pkl", pickled_tensor(dtype, sizes)),
        ("byteorder", sys.byteorder.encode()),
        ("version", b"3\n"),
    ):
        path = f"{_ROOT}/{name}".encode()
        directory += _directory_entry(path, len(content), len(start))
        start += _local(path, len(content), b"") + content
    return start, directory


def _local(name: bytes, length: int, extra: bytes) -> bytes:
    return _LOCAL.pack(b"PK\3\4", 0, 0, 0, 0, 0, 0, length, length, len(name), len(extra)) + name + extra


def _directory_entry(name: bytes, length: int, at: int) -> bytes:
    return _ENTRY.pack(b"PK\1\2", 0, 0, 0, 0, 0, 0, 0, length, length, len(name), 0, 0, 0, 0, 0, at) + name
