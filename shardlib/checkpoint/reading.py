"""Tensors on disk, of which ranks read the bytes that they need.

`TensorsOnDisk` are the chunks of files; a `Fill` is what a restore reads into one fragment of a state. A restore is a list of
fills, made before anything is read.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import torch
from torch.autograd.graph import increment_version

from shardlib.checkpoint import manifest
from shardlib.checkpoint.fragments import Fragment, runs
from shardlib.checkpoint.manifest import Chunk, Entry, Manifest
from shardlib.checkpoint.writing import bytes_of
from shardlib.common._compat import storage_id
from shardlib.common.systems import LINUX, MACOS, require_system
from shardlib.common.thresholds import Threshold
from shardlib.errors import CheckpointError
from shardlib.mesh.specs import Window
from shardlib.optim.base import Packed

BUFFER = Threshold(1 << 26)  # bytes, at most, of what elements pass through that are not read in place
# Bytes: runs shorter than the first are read with what lies between them, unless run and gap are longer than the second.
_SHORT, _GAP = Threshold(1 << 12), Threshold(1 << 16)
_OPEN = 128  # files at a time: systems allow a process about a thousand
_VERIFIED = Threshold(1 << 22)  # bytes that are read at a time to verify them: they stay in the processor's cache


class ReadItem(NamedTuple):
    """Elements of a fragment that one chunk holds.

    Attributes:
        entry, chunk: the chunk, and its tensor.
        wanted: the elements.
        read: the box of the chunk that is read: ``wanted``, or more where its runs are short.
        target: the view of the fragment to fill, in the shape of ``wanted``.
    """

    entry: Entry
    chunk: Chunk
    wanted: Window
    read: Window
    target: torch.Tensor

    @property
    def bytes(self) -> int:
        return self.read.numel * self.entry.torch_dtype.itemsize


def open_checkpoint(folder: Path) -> TensorsOnDisk:
    """The checkpoint in a folder. Raises `CheckpointError` if its manifest cannot be read, or is damaged."""
    try:
        text = (folder / manifest.NAME).read_bytes()
    except OSError as error:
        raise CheckpointError(f"{folder / manifest.NAME} cannot be read ({error}); use another checkpoint") from error
    return TensorsOnDisk(folder, manifest.loads(text, folder / manifest.NAME))


class TensorsOnDisk:
    """Tensors in the files of a ``folder``, which hold what the ``manifest`` says."""

    folder: Path
    manifest: Manifest

    def __init__(self, folder: Path, held: Manifest) -> None:
        self.folder, self.manifest = folder, held
        self._files: dict[str, int] = {}

    def __enter__(self) -> TensorsOnDisk:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for fd in self._files.values():
            os.close(fd)
        self._files.clear()

    @property
    def tensors(self) -> dict[str, Entry]:
        """Name -> `Entry` of every tensor."""
        return self.manifest.tensors

    def has(self, fragment: Fragment, name: str) -> bool:
        """Whether there is a tensor ``name`` of the shape that a fragment is of."""
        return name in self.tensors and self.tensors[name].shape == fragment.window.shape

    def missing(self, fragment: Fragment, name: str) -> str:
        """Why tensor ``name`` cannot fill a fragment, or ""."""
        entry = self.tensors.get(name)
        if entry is None:
            return f"{fragment.name}: not in the checkpoint"
        if entry.shape != fragment.window.shape:
            return f"{fragment.name}: saved {list(entry.shape)}, wanted {list(fragment.window.shape)}"
        # The chunks of a tensor do not overlap.
        numel = fragment.data.numel()
        lacking = numel - sum(item.wanted.numel for item in self.items(fragment, name))
        return f"{fragment.name}: {lacking} of {numel} elements are not in the checkpoint" if lacking else ""

    def items(self, fragment: Fragment, name: str) -> Iterator[ReadItem]:
        """What has to be read to fill a fragment from tensor ``name``."""
        entry = self.tensors[name]
        for box, elements in fragment.boxes():
            view = elements.view(box.sizes)
            for chunk in entry.chunks:
                held = entry.box(chunk)
                shared = box.overlap(held)
                if shared is not None:
                    target = shared.inside(box).of(view)
                    yield ReadItem(entry, chunk, shared, _read_box(shared, held, entry), target)

    def fill(self, fragment: Fragment, name: str) -> None:
        """Read a fragment's elements from tensor ``name``. Those that the checkpoint lacks stay as they are."""
        for item in self.items(fragment, name):
            self._read(item)

    def _read(self, item: ReadItem) -> None:
        entry, target = item.entry, item.target
        plain = target.device.type == "cpu" and target.dtype == entry.torch_dtype and target.is_contiguous()
        if plain and item.read == item.wanted:
            self._read_runs(item, item.read, target.reshape(-1))
            increment_version(target)  # as of every write that torch sees
            return
        # The elements go through a buffer, some rows at a time.
        for read, wanted in _slabs(item.read, item.wanted, max(1, BUFFER() // entry.torch_dtype.itemsize)):
            buffer = torch.empty(read.numel, dtype=entry.torch_dtype)
            self._read_runs(item, read, buffer)
            source = wanted.inside(read).of(buffer.view(read.sizes))
            wanted.inside(item.wanted).of(target).copy_(source)

    def _read_runs(self, item: ReadItem, box: Window, out: torch.Tensor) -> None:
        """Read a box of an item's chunk into a flat tensor on the CPU."""
        chunk, itemsize = item.chunk, out.element_size()
        found = runs(box, item.entry.box(chunk))
        fd, view, done, length = self._open(chunk.file), bytes_of(out), 0, found.length * itemsize
        for start in found.starts():
            self._read_at(fd, view[done : done + length], chunk.data + start * itemsize, chunk.file)
            done += length

    def _read_at(self, fd: int, view: memoryview, offset: int, file: str) -> None:
        """Fill ``view`` from a file."""
        while view.nbytes:
            count = os.preadv(fd, [view], offset)
            if not count:
                raise CheckpointError(f"{self.folder / file} ends at byte {offset}; use another checkpoint")
            view, offset = view[count:], offset + count

    def _open(self, file: str) -> int:
        if file not in self._files:
            require_system("reading a checkpoint", LINUX, MACOS)
            if len(self._files) == _OPEN:
                os.close(self._files.pop(next(iter(self._files))))
            self._files[file] = os.open(self.folder / file, os.O_RDONLY)
        return self._files[file]

    def damages(self, share: int = 0, shares: int = 1) -> list[str]:
        """One line for each file or chunk that is not as it was written. Of ``shares`` shares of the checkpoint's chunks,
        share number ``share`` is read."""
        found = []
        for file, size in self.manifest.files.items():
            if problem := self._damage_of_file(file, size):
                every = self.tensors.items()
                leaves = sorted(name for name, entry in every if any(chunk.file == file for chunk in entry.chunks))
                within = f" (it holds {', '.join(leaves[:3])}{', …' if len(leaves) > 3 else ''})" if leaves else ""
                found.append(f"{file}: {problem}{within}")
        if found:
            return found
        buffer = torch.empty(_VERIFIED(), dtype=torch.uint8)
        for name, chunk in self.shared_out(share, shares):
            try:
                if self._checksum(chunk, buffer) == chunk.checksum:
                    continue
                why = "differ from what was written"
            except (OSError, CheckpointError) as error:  # on one rank: all ranks have to learn of it
                why = f"cannot be read ({error})"
            stop = chunk.offset + chunk.length
            found.append(f"{chunk.file}: bytes {chunk.offset} to {stop}, of {name}, {why}")
        return found

    def shared_out(self, share: int, shares: int) -> Iterator[tuple[str, Chunk]]:
        """The names and chunks that share number ``share`` of ``shares`` verifies: nearly equally many bytes each."""
        every = ((name, chunk) for name, entry in self.tensors.items() for chunk in entry.chunks)
        chunks = [(name, chunk) for name, chunk in every if chunk.checksum is not None]
        chunks.sort(key=lambda pair: (pair[1].file, pair[1].offset))
        total = sum(chunk.length for _, chunk in chunks)
        done = 0
        for name, chunk in chunks:
            if (done + chunk.length // 2) * shares // max(total, 1) == share:
                yield name, chunk
            done += chunk.length

    def _damage_of_file(self, file: str, size: int) -> str:
        """What a look at a file's size, or at the whole of a small file, shows; or ""."""
        path = self.folder / file
        try:
            found = os.stat(path).st_size
            if found != size:
                return f"has {found} bytes, not {size}"
            if file in self.manifest.whole_files and zlib.crc32(path.read_bytes()) != self.manifest.whole_files[file]:
                return "differs from what was written"
            self._open(file)
        except OSError as error:
            return f"cannot be read ({error})"
        return ""

    def _checksum(self, chunk: Chunk, buffer: torch.Tensor) -> int:
        fd, checksum, view = self._open(chunk.file), 0, bytes_of(buffer)
        for offset in range(chunk.offset, chunk.offset + chunk.length, view.nbytes):
            part = view[: min(view.nbytes, chunk.offset + chunk.length - offset)]
            self._read_at(fd, part, offset, chunk.file)
            checksum = zlib.crc32(part, checksum)
        return checksum


def _read_box(wanted: Window, held: Window, entry: Entry) -> Window:
    """The box to read for the ``wanted`` elements of a chunk: with whole inner dimensions until runs are not short."""
    first, sizes = list(wanted.first), list(wanted.sizes)
    length = entry.torch_dtype.itemsize
    for dim in reversed(range(len(sizes))):
        if math.prod(sizes[:dim]) == 1 or length * sizes[dim] >= _SHORT() or length * held.sizes[dim] > _GAP():
            break
        first[dim], sizes[dim] = held.first[dim], held.sizes[dim]
        length *= sizes[dim]
    return Window(wanted.shape, tuple(first), tuple(sizes))


def _slabs(read: Window, wanted: Window, limit: int) -> Iterator[tuple[Window, Window]]:
    """``read`` cut along its outer dimensions into boxes of at most ``limit`` elements, each with its part of ``wanted``."""
    if read.numel <= limit or not read.sizes:
        yield read, wanted
        return
    dim = next(dim for dim, size in enumerate(read.sizes) if size > 1)
    step = max(1, limit * read.sizes[dim] // read.numel)
    for start in range(0, read.sizes[dim], step):
        first, sizes = list(read.first), list(read.sizes)
        first[dim], sizes[dim] = first[dim] + start, min(step, sizes[dim] - start)
        slab = Window(read.shape, tuple(first), tuple(sizes))
        part = slab.overlap(wanted)
        if part is not None:
            yield from _slabs(slab, part, limit)


class Fill(NamedTuple):
    """A fragment, and the saved tensors whose weighted sum it is to hold.

    Attributes:
        fragment: the elements to fill. On the meta device, if they are not consecutive in the state.
        sources: names and weights of saved tensors. Elements that a tensor lacks count as zero, except in the only tensor
            with weight 1, which leaves them as they are.
        into: the tensor of the state whose elements, in order, are the fragment's and then padding; None if the fragment is
            itself a view of the state.
    """

    fragment: Fragment
    sources: tuple[tuple[str, float], ...]
    into: torch.Tensor | None = None

    def bytes(self, saved: TensorsOnDisk) -> int:
        """Bytes that `run` reads."""
        parts = self._parts(self.fragment)
        return sum(item.bytes for part in parts for name, _ in self.sources for item in saved.items(part, name))

    def run(self, saved: TensorsOnDisk) -> None:
        if self.into is None:
            self._fill(self.fragment, saved)
            return
        flat = torch.zeros(self.into.numel(), dtype=self.into.dtype)
        self._fill(self.fragment._replace(data=flat[: self.fragment.data.numel()]), saved)
        self.into.copy_(flat.view(self.into.shape))

    def _fill(self, fragment: Fragment, saved: TensorsOnDisk) -> None:
        for part in self._parts(fragment):
            if self._plain:
                saved.fill(part, self.sources[0][0])
                continue
            total = torch.zeros(part.data.numel(), dtype=torch.float64)
            for name, weight in self.sources:
                held = torch.zeros(part.data.numel(), dtype=part.data.dtype)
                saved.fill(part._replace(data=held), name)
                total.add_(held, alpha=weight)
            part.data.copy_(total)

    @property
    def _plain(self) -> bool:
        return len(self.sources) == 1 and self.sources[0][1] == 1

    def _parts(self, fragment: Fragment) -> Iterable[Fragment]:
        """The fragments that are filled one at a time: a sum needs memory beside the state."""
        return [fragment] if self._plain else fragment.parts(max(1, BUFFER() // 32))


class PackedFill(NamedTuple):
    """The fills of one packed tensor, whose fragments are views of a tensor without memory. It is decoded, filled and encoded
    a part at a time."""

    node: Packed
    fills: Sequence[Fill]

    def bytes(self, saved: TensorsOnDisk) -> int:
        """Bytes that `run` reads."""
        parts = ((first, torch.empty(stop - first, device="meta")) for first, stop in self._parts())
        return sum(fill.bytes(saved) for first, values in parts for fill in self._within(first, values))

    def run(self, saved: TensorsOnDisk) -> None:
        for first, stop in self._parts():
            values = self.node.part(first, stop)
            for fill in self._within(first, values):
                fill.run(saved)
            self.node.pack(values, first)

    def _parts(self) -> Iterator[tuple[int, int]]:
        """First and last index of each part."""
        size, block = self.node.like.numel(), self.node.block
        # Decoding and encoding take some ten tensors of a part's size, which allocators may give back late.
        step = max(block, BUFFER() // 256 // block * block)
        for first in range(0, size, step):
            yield first, min(first + step, size)

    def _within(self, first: int, values: torch.Tensor) -> Iterator[Fill]:
        """What fills a part, which begins at element ``first`` and is held by ``values``."""
        for fill in self.fills:
            begin = int(fill.fragment.data.storage_offset())
            low, high = max(first, begin), min(first + values.numel(), begin + fill.fragment.data.numel())
            if low < high:
                part = fill.fragment.part(low - begin, high - begin)
                yield fill._replace(fragment=part._replace(data=values[low - first : high - first]))


def joined(fills: Iterable[Fill], packed: Mapping[int, Packed]) -> Iterator[Fill | PackedFill]:
    """The fills, those of each tensor of ``packed`` (see `CheckpointTrees`) together."""
    of_packed: dict[int, list[Fill]] = {}
    for fill in fills:
        storage = storage_id(fill.fragment.data.untyped_storage())
        if storage in packed:
            of_packed.setdefault(storage, []).append(fill)
        else:
            yield fill
    yield from (PackedFill(packed[storage], some) for storage, some in of_packed.items())
