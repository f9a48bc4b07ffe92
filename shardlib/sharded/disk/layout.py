"""Where each buffer lies in the files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from shardlib.common.disk import whole_blocks
from shardlib.common.tensors import dtype_name

FORMAT = 2
_KINDS = {True: "a state that was moved", False: "states of a running step"}


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


class FileLayout:
    """The places of named buffers in files. Every file has two halves, and every buffer a slot in both. (With one slot a file
    has the first half alone.)

    A buffer is cut into ranges of ``request`` bytes, each of which goes to the file that has least, so that files in several
    folders are read and written at once.

    Attributes:
        buffers: name -> `Flat`.
        durable: whether the files are for another run to take up.
        slots: copies of a buffer that there is room for.
        extents: name -> its ranges, in order.
        halves: the bytes of half of each file.
        sizes: the bytes of each file.
    """

    def __init__(
        self,
        rank: int,
        ranks: int,
        buffers: Mapping[str, Flat],
        files: int,
        request: int,
        durable: bool,
        slots: int = 2,
    ) -> None:
        self.rank, self.ranks, self.buffers, self.request = rank, ranks, dict(buffers), request
        self.durable, self.slots = durable, slots
        self.extents: dict[str, tuple[Extent, ...]] = {}
        filled = [0] * files
        for name, flat in self.buffers.items():
            extents = []
            for start in range(0, flat.padded, request):
                file, length = filled.index(min(filled)), min(request, flat.padded - start)
                extents.append(Extent(file, filled[file], start, length))
                filled[file] += length
            self.extents[name] = tuple(extents)
        self.halves = tuple(filled)
        self.sizes = tuple(slots * half for half in filled)

    @property
    def files(self) -> int:
        return len(self.halves)

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
                lines.append(f"{name}: {_said(theirs.get(name))}, here {_said(ours.get(name))}")
        return lines or ["the order of its buffers"]


def _said(flat: list[Any] | None) -> str:
    return "absent" if flat is None else f"{flat[0]:,} × {flat[1]}"
