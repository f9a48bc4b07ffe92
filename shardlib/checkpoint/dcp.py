"""Parameters from checkpoints of `torch.distributed.checkpoint`, such as those of FSDP2."""

from __future__ import annotations

import io
import mmap
import pickle
import zipfile
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from shardlib.checkpoint.agreement import from_first_rank
from shardlib.checkpoint.archives import Stored, data_at, number
from shardlib.checkpoint.importing import Imported, Target, import_into, mesh_of
from shardlib.checkpoint.manifest import METADATA, Chunk, Entry, Manifest
from shardlib.common.tensors import dtype_name
from shardlib.errors import CheckpointError

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


def import_dcp(
    folder: str | Path,
    into: Target,
    *,
    prefix: str = "",
    optimizer: str = "optim.",
    step: int | None = None,
    partial: Sequence[str] = (),
) -> Target:
    """Fill parameters, or a train state, from a folder of `torch.distributed.checkpoint.save`, such as an FSDP2 model's.
    Every rank must call it, and reads the bytes of its shards only. No code of the checkpoint is run.

    A state's moments are filled where they are Adam's, Adagrad's, Lion's or SGD's, or in the layout of a torch optimizer
    (`shardlib.optim.from_torch`), from what ``get_optimizer_state_dict`` of `torch.distributed.checkpoint.state_dict` gave.

    Args:
        into: the layout: `Sharded` parameters, or a fresh state of `make_train_step`. Memory is reused, dtypes are kept.
        prefix: what names in the checkpoint begin with: ``"model."`` for ``dcp.save({"model": model.state_dict()})``.
        optimizer: what names of the optimizer's state begin with.
        step: the state's step; by default as many as the optimizer has counted. torch's SGD counts none.
        partial: globs over names of tensors that may be missing in the checkpoint or in ``into``: ``["optim.*"]``.

    Returns:
        The parameters, or a state at ``step``.

    Raises:
        FileNotFoundError: there is no checkpoint in the folder.
        CheckpointError: its files are damaged, its metadata name something else than tensors' places, or its tensors are
            compressed. A state's optimizer has counted no steps, and ``step`` is not given.
        TreeError: names or shapes differ, or the values for leaves that are tied; lists all of them. ``into`` is unchanged.
        TypeError: ``into`` is neither.

    >>> import torch.distributed.checkpoint as dcp
    >>> _ = dcp.save({"layer.weight": torch.ones(2, 3)}, checkpoint_id="theirs", no_dist=True)
    >>> params = sl.shard({"layer": {"weight": torch.zeros(2, 3)}}, sl.make_mesh())
    >>> sl.checkpoint.import_dcp("theirs", params)["layer"]["weight"].sum()
    tensor(6.)
    """
    mesh = mesh_of("import_dcp", into)
    read = from_first_rank(mesh, lambda: _imported(Path(folder), f"{optimizer}state."), folder)
    return import_into(read, into, prefix, partial, step)


def _imported(folder: Path, optimizer: str) -> Imported:
    if not (folder / METADATA).exists():
        raise FileNotFoundError(f"{folder} has no {METADATA}: no checkpoint of torch.distributed.checkpoint")
    held, numbers = _read(folder), dict[str, dict[str, float]]()
    for name, entry in list(held.tensors.items()):
        param, _, kind = name.removeprefix(optimizer).rpartition(".")
        if name.startswith(optimizer) and (kind == "step" or not entry.shape):
            file, *_, data, _, _, _ = entry.chunks[0]
            stored = Stored(file, data, entry.torch_dtype, entry.shape, True)
            numbers.setdefault(kind, {})[param] = number(folder, stored)
        if name.startswith(optimizer) and kind == "step":
            del held.tensors[name]
    step = int(max(numbers["step"].values())) if "step" in numbers else None
    return Imported(folder, held, step, numbers, optimizer)


class _MetadataUnpickler(pickle.Unpickler):
    """An unpickler of ``.metadata`` files that makes what they need, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not dtype and name not in _ALLOWED.get(module, ()):
            raise CheckpointError(f"the metadata name {module}.{name}, which no place of a tensor needs: not trusted")
        return super().find_class(module, name)


def _member(kind: Any, name: str) -> Enum:
    """A member of an enumeration, which some versions of Python (3.11.2) write as an attribute of its class."""
    if not (isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__):
        raise CheckpointError(f"the metadata name the attribute {name} of {kind!r}, which no place needs: not trusted")
    return kind.__members__[name]


def _read(folder: Path) -> Manifest:
    """The tensors of a checkpoint, with the places of their elements."""
    found = _MetadataUnpickler(io.BytesIO((folder / METADATA).read_bytes())).load()
    tensors: dict[str, Entry] = {}
    for index, place in found.storage_data.items():
        described = found.state_dict_metadata[index.fqn]
        if not hasattr(described, "chunks"):
            continue  # no tensor: a pickle, which stays unread
        if getattr(place, "transform_descriptors", None):
            raise CheckpointError(f"{folder}: {index.fqn} is compressed; save it without extensions")
        dtype = dtype_name(described.properties.dtype)
        entry = tensors.setdefault(index.fqn, Entry(dtype, tuple(described.size)))
        sizes = next(tuple(chunk.sizes) for chunk in described.chunks if chunk.offsets == index.offset)
        data = _elements_at(folder / place.relative_path, place.offset, place.length)
        entry.chunks.append(
            Chunk(place.relative_path, place.offset, place.length, data, None, tuple(index.offset), sizes)
        )
    files = {chunk.file for entry in tensors.values() for chunk in entry.chunks}
    lengths = {file: (folder / file).stat().st_size for file in sorted(files)}
    return Manifest(step=0, seed=0, scale=None, mesh={}, tensors=tensors, files=lengths)


def _elements_at(path: Path, offset: int, length: int) -> int:
    """Where the elements begin in an item (see `shardlib.checkpoint.writing`): a zip file, before which others may stand."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), offset + length, access=mmap.ACCESS_READ) as start:
        item: Any = start
        with zipfile.ZipFile(item) as archive:
            return data_at(item, path, next(each for each in archive.infolist() if each.filename.endswith("/data/0")))
