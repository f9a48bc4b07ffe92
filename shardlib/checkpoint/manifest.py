"""The manifest of a checkpoint: which tensors it holds, where every chunk of them lies, and a checksum of every byte.

``manifest.json`` is one JSON object, whose last member is a checksum of the text before it. The files of a checkpoint are
those that it names, each covered by checksums from end to end.
"""

from __future__ import annotations

import json
import pickle
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shardlib.common._compat import storage_info
from shardlib.errors import CheckpointError
from shardlib.mesh.specs import Window

FORMAT = 1
NAME = "manifest.json"
METADATA = ".metadata"  # of `torch.distributed.checkpoint`, by which plain torch reads a checkpoint
_MARK = ',"checksum":'


class Chunk(NamedTuple):
    """A box of a tensor, as an item of a file: see `shardlib.checkpoint.writing`.

    Attributes:
        file: the file's name.
        offset, length: where the item begins in the file, and its bytes.
        data: where the elements begin in the file.
        checksum: CRC-32 of the item; None where nobody has taken it, in files of other libraries.
        first, sizes: the box's first index and size in each dimension.
    """

    file: str
    offset: int
    length: int
    data: int
    checksum: int | None
    first: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass
class Entry:
    """A tensor of a checkpoint: its dtype by name, its shape, and its chunks."""

    dtype: str
    shape: tuple[int, ...]
    chunks: list[Chunk] = field(default_factory=list)

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    def box(self, chunk: Chunk) -> Window:
        return Window(self.shape, chunk.first, chunk.sizes)


@dataclass
class Manifest:
    """What a checkpoint holds.

    Attributes:
        format: number of the format of the files.
        shardlib: the library's version that wrote it.
        step, seed, scale: of the `TrainState`; ``scale`` are the fields of its `LossScale`, or None.
        mesh: axis -> size, of the ranks that wrote it.
        specs: path of a parameter -> its spec and the optimizer state's, as text.
        notes: what the caller added: anything that JSON can hold.
        tensors: name -> `Entry`.
        files: name -> bytes.
        whole_files: name -> CRC-32 of files that hold no items.
    """

    step: int
    seed: int
    scale: dict[str, Any] | None
    mesh: dict[str, int]
    shardlib: str = ""
    specs: dict[str, str] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Entry] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)
    whole_files: dict[str, int] = field(default_factory=dict)
    format: int = FORMAT

    def dumps(self) -> bytes:
        """The text of ``manifest.json``."""
        names = list(self.files)
        number = {name: index for index, name in enumerate(names)}
        rows = {
            name: [entry.dtype, entry.shape, [[number[chunk.file], *chunk[1:]] for chunk in entry.chunks]]
            for name, entry in self.tensors.items()
        }
        facts = {name: value for name, value in vars(self).items() if name != "tensors"}
        text = json.dumps(facts | {"tensors": rows}, separators=(",", ":"))[:-1].encode()
        return text + f"{_MARK}{zlib.crc32(text)}}}".encode()


def loads(text: bytes, where: Path) -> Manifest:
    """The manifest in the text of a ``manifest.json``. Raises `CheckpointError` for a text that was changed since it was
    written, or is of a later format."""
    body, mark, end = text.rpartition(_MARK.encode())
    if not mark or not end.endswith(b"}") or end[:-1] != str(zlib.crc32(body)).encode():
        raise CheckpointError(f"{where}: the manifest is damaged (its checksum differs); use an older checkpoint")
    facts = json.loads(body + b"}")
    if facts["format"] > FORMAT:
        raise CheckpointError(
            f"{where}: format {facts['format']} was written by shardlib {facts['shardlib']}, and this one reads up to "
            f"{FORMAT}. Install a newer shardlib"
        )
    names = list(facts["files"])
    tensors = {name: _entry(row, names) for name, row in facts.pop("tensors").items()}
    return Manifest(**facts, tensors=tensors)


def _entry(row: Any, names: list[str]) -> Entry:
    dtype, shape, chunks = row
    made = [Chunk._make((names[at], *places, tuple(first), tuple(sizes))) for at, *places, first, sizes in chunks]
    return Entry(dtype, tuple(shape), made)


def metadata_of(manifest: Manifest) -> bytes:
    """The bytes of a ``.metadata`` file that lists the chunks of a manifest."""
    import torch.distributed.checkpoint.metadata as dcp  # a third of a second to import

    tensors: dict[str, dcp.STORAGE_TYPES] = {}
    places = {}
    for name, entry in manifest.tensors.items():
        chunks = []
        for index, chunk in enumerate(entry.chunks):
            first = torch.Size(chunk.first)
            chunks.append(dcp.ChunkStorageMetadata(first, torch.Size(chunk.sizes)))
            places[dcp.MetadataIndex(name, first, index)] = storage_info(chunk.file, chunk.offset, chunk.length)
        properties = dcp.TensorProperties(dtype=entry.torch_dtype)
        tensors[name] = dcp.TensorStorageMetadata(properties, torch.Size(entry.shape), chunks)
    return pickle.dumps(dcp.Metadata(tensors, planner_data={name: (name,) for name in tensors}, storage_data=places))
