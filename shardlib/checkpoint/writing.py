"""Writing one rank's file of a checkpoint: items one after the other, with their checksums."""

from __future__ import annotations

import os
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shardlib.checkpoint import items
from shardlib.checkpoint.fragments import Fragment, boxes
from shardlib.checkpoint.manifest import Chunk, Entry
from shardlib.common.disk import begin_writing
from shardlib.common.tensors import dtype_name, raw_bytes
from shardlib.common.thresholds import Threshold

# Bytes of an item at most: far below 4 GiB, from which on zip files need another form.
_LARGEST = Threshold(1 << 26)
_BUFFERS, _BATCH = 512, Threshold(1 << 25)  # of one system call: Linux takes 1,024 buffers and 2 GiB


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
        itemsize, first = fragment.data.element_size(), 0
        limit = max(1, _LARGEST() // itemsize)
        for low in range(fragment.start, fragment.stop, limit):
            for box in boxes(fragment.window, low, min(low + limit, fragment.stop)):
                head, tail = items.frame(fragment.data.dtype, box.sizes, offset)
                length = len(head) + box.numel * itemsize + len(tail)
                chunk = Chunk(file, offset, length, offset + len(head), 0, box.first, box.sizes)
                yield _Item(fragment, chunk, head, fragment.data[first : first + box.numel], tail)
                first += box.numel
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
        fragment = item.fragment
        dtype = dtype_name(fragment.data.dtype)
        entry = tensors.setdefault(fragment.name, Entry(dtype, fragment.window.shape))
        entry.chunks.append(item.chunk._replace(checksum=checksum))


def write_all(fd: int, buffers: Sequence[bytes | memoryview], offset: int) -> int:
    """Write buffers one after the other from ``offset`` on; returns their bytes."""
    views = [memoryview(buffer) for buffer in buffers]
    left = [view for view in views if view.nbytes]
    total = sum(view.nbytes for view in left)
    end = offset + total
    while left:
        done = os.pwritev(fd, left, offset)
        offset += done
        while left and done >= left[0].nbytes:
            done -= left.pop(0).nbytes
        if done:
            left[0] = left[0][done:]
    assert offset == end
    return total
