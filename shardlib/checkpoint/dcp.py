"""Parameters from checkpoints of `torch.distributed.checkpoint`, such as those of FSDP2."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from shardlib.checkpoint import metadata
from shardlib.checkpoint.importing import fill_params
from shardlib.checkpoint.manifest import Chunk, Entry, Manifest
from shardlib.checkpoint.reading import Saved
from shardlib.errors import CheckpointError
from shardlib.sharded.tree import Sharded

_METADATA = "torch.distributed.checkpoint.metadata"
# What a `.metadata` file may name; anything else could run code.
_ALLOWED = {
    _METADATA: {
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", "device"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "Path", "PurePosixPath"},
    "pathlib._local": {"PosixPath", "Path"},
}  # fmt: skip


def import_dcp(folder: str | Path, params: Sharded, *, prefix: str = "", partial: Sequence[str] = ()) -> Sharded:
    """Fill parameters from a folder of `torch.distributed.checkpoint.save`, such as an FSDP2 model's. Every rank must call
    it, and reads the bytes of its shards only. No code of the checkpoint is run.

    Args:
        params: the layout; its memory is reused, and its dtypes are kept.
        prefix: what names in the checkpoint begin with: ``"model."`` for ``dcp.save({"model": model.state_dict()})``.
        partial: globs over names of tensors that may be missing in the checkpoint or in ``params``: ``["optim.*"]``.

    Returns:
        ``params``.

    Raises:
        FileNotFoundError: there is no checkpoint in the folder.
        CheckpointError: its metadata name something else than tensors' places, or its tensors are compressed.
        TreeError: names or shapes differ; lists all of them. ``params`` are unchanged.

    >>> import torch.distributed.checkpoint as dcp
    >>> _ = dcp.save({"layer.weight": torch.ones(2, 3)}, checkpoint_id="theirs", no_dist=True)
    >>> params = sl.shard({"layer": {"weight": torch.zeros(2, 3)}}, sl.make_mesh())
    >>> sl.checkpoint.import_dcp("theirs", params)["layer"]["weight"].sum()
    tensor(6.)
    """
    folder = Path(folder)
    if not (folder / metadata.NAME).exists():
        raise FileNotFoundError(f"{folder} has no {metadata.NAME}: it is no checkpoint of torch.distributed.checkpoint")
    with Saved(folder, _read(folder)) as saved:
        fill_params(saved, params, prefix, partial)
    return params


class _Unpickler(pickle.Unpickler):
    """An unpickler of `.metadata` files that makes what they need, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not dtype and name not in _ALLOWED.get(module, ()):
            raise CheckpointError(f"the metadata name {module}.{name}, which no place of a tensor needs: not trusted")
        return super().find_class(module, name)


def _read(folder: Path) -> Manifest:
    """The tensors of a checkpoint, with the places of their elements."""
    found = _Unpickler(io.BytesIO((folder / metadata.NAME).read_bytes())).load()
    tensors: dict[str, Entry] = {}
    for index, place in found.storage_data.items():
        described = found.state_dict_metadata[index.fqn]
        if not hasattr(described, "chunks"):
            continue  # no tensor: a pickle, which stays unread
        if getattr(place, "transform_descriptors", None):
            raise CheckpointError(f"{folder}: {index.fqn} is compressed; save it without extensions")
        dtype = str(described.properties.dtype).removeprefix("torch.")
        entry = tensors.setdefault(index.fqn, Entry(dtype, tuple(described.size)))
        sizes = next(tuple(chunk.sizes) for chunk in described.chunks if chunk.offsets == index.offset)
        data = place.offset + _elements_at(folder / place.relative_path, place.offset, place.length)
        entry.chunks.append(Chunk(place.relative_path, place.offset, place.length, data, 0, tuple(index.offset), sizes))
    return Manifest(step=0, seed=0, scale=None, mesh={}, tensors=tensors)


def _elements_at(path: Path, offset: int, length: int) -> int:
    """Where the elements begin in an item (see `shardlib.checkpoint.items`)."""
    with _Part(path, offset, length) as part, zipfile.ZipFile(part) as archive:
        entry = next(each for each in archive.infolist() if each.filename.endswith("/data/0"))
        if entry.compress_type != zipfile.ZIP_STORED:
            raise CheckpointError(f"{path}: the item at byte {offset} is compressed; save it without extensions")
        part.seek(entry.header_offset + 26)  # the lengths of the entry's name and extra field
        lengths = part.read(4)
        return entry.header_offset + 30 + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")


class _Part(io.RawIOBase):
    """A part of a file as a file."""

    def __init__(self, path: Path, offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._at = path.open("rb"), offset, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, position: int, whence: int = io.SEEK_SET) -> int:
        self._at = position + (0, self._at, self._length)[whence]
        return self._at

    def read(self, count: int = -1) -> bytes:
        left = self._length - self._at
        self._file.seek(self._offset + self._at)
        found = self._file.read(left if count < 0 else min(count, left))
        self._at += len(found)
        return found

    def close(self) -> None:
        self._file.close()
        super().close()
