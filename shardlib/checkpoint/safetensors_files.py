"""Files of the safetensors format, as transformers names them.

A file begins with the length of a JSON header (8 bytes, little-endian); then come the header (name -> dtype, shape, first and
last byte) and the elements. Since all sizes are known beforehand, every rank writes and reads its own ranges.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shardlib.checkpoint.fragments import Fragment, runs
from shardlib.checkpoint.manifest import Chunk, Entry, Manifest
from shardlib.checkpoint.writing import bytes_of, write_all
from shardlib.common.disk import sync_folder
from shardlib.common.tensors import dtype_name
from shardlib.errors import CheckpointError, TreeError
from shardlib.mesh.specs import Window
from shardlib.models.huggingface.conversion import Origin, OriginTensor, of_model

_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
_NAMES = {name: short for short, name in _DTYPES.items()}
_ONE, _INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD = 5 * 10**9  # bytes of a file at most, unless a caller says otherwise: as transformers
_ALIGNMENT = 8  # bytes: of the header, so that elements are aligned


class Place(NamedTuple):
    """A tensor's place in a file: offset of its first byte, dtype and shape."""

    file: str
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


def laid_out(described: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], limit: int = SHARD) -> dict[str, Place]:
    """The place of each tensor, header included."""
    groups: list[dict[str, Place]] = [{}]
    size = 0
    for name, (dtype, shape) in described.items():
        place = Place("", 0, dtype, shape)
        if groups[-1] and size + place.bytes > limit:
            groups.append({})
            size = 0
        groups[-1][name] = place
        size += place.bytes
    tensors = {}
    for number, group in enumerate(groups, 1):
        file = _ONE if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        start = len(_header(group))
        for name, place in group.items():
            tensors[name] = place._replace(file=file, offset=start)
            start += place.bytes
    return tensors


def _header(tensors: Mapping[str, Place]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, place in tensors.items():
        start, end = end, end + place.bytes
        short = _NAMES.get(dtype_name(place.dtype))
        if short is None:
            raise TreeError(f"{name}: safetensors files have no {place.dtype}; cast it")
        entries[name] = {"dtype": short, "shape": list(place.shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _files(tensors: Mapping[str, Place]) -> list[str]:
    return list(dict.fromkeys(place.file for place in tensors.values()))


def begin(folder: Path, tensors: Mapping[str, Place]) -> None:
    """Make the files, with their headers, under names of their own until they are complete."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in _files(tensors):
        header = _header({name: place for name, place in tensors.items() if place.file == file})
        (folder / f"{file}.partial").write_bytes(header)


def write(
    folder: Path, tensors: Mapping[str, Place], fragments: Iterable[Fragment], held: Mapping[str, Sequence[Origin]]
) -> None:
    """Write fragments to their places.

    Args:
        held: a fragment's name -> boxes of its tensor, and the boxes of ``tensors`` that hold them.
    """
    opened: dict[str, int] = {}
    try:
        for fragment in fragments:
            for box, values in fragment._replace(data=fragment.data.cpu()).boxes():
                view = values.view(box.sizes)
                for part in (part for origin in held[fragment.name] if (part := origin.within(box))):
                    place = tensors[part.name]
                    if place.file not in opened:
                        opened[place.file] = os.open(folder / f"{place.file}.partial", os.O_WRONLY)
                    _write_box(opened[place.file], place, part.held, part.box.inside(box).of(view))
        for fd in opened.values():
            os.fsync(fd)
    finally:
        for fd in opened.values():
            os.close(fd)


def _write_box(fd: int, place: Place, box: Window, values: torch.Tensor) -> None:
    memory, itemsize, first = bytes_of(values.contiguous().reshape(-1)), place.dtype.itemsize, 0
    found = runs(box, Window.whole(place.shape))
    for start in found.starts():
        run = memory[first : first + found.length * itemsize]
        write_all(fd, [run], place.offset + start * itemsize)
        first += run.nbytes


def finish(folder: Path, tensors: Mapping[str, Place]) -> None:
    """Give the files their names, and write the index of several."""
    sync_folder(folder)
    files = _files(tensors)
    for file in files:
        os.replace(folder / f"{file}.partial", folder / file)
    index = folder / _INDEX
    if files == [_ONE]:
        index.unlink(missing_ok=True)
    else:
        places = tensors.values()
        sizes = {
            "total_parameters": sum(math.prod(place.shape) for place in places),
            "total_size": sum(place.bytes for place in places),
        }
        facts = {"metadata": sizes, "weight_map": {name: place.file for name, place in tensors.items()}}
        (folder / _ONE).unlink(missing_ok=True)  # first: readers look for it before the index
        index.write_text(json.dumps(facts, indent=2))
    sync_folder(folder)


def opened(path: Path, module: Any = None) -> tuple[Path, Manifest]:
    """The folder and the tensors of safetensors files; with a model of transformers the model's tensors, by its names."""
    folder = path if path.is_dir() else path.parent
    if path.is_file():
        files = [path.name]
    elif not (path / _ONE).exists() and (path / _INDEX).exists():  # transformers looks for the one file first, too
        files = _indexed(path / _INDEX)
    else:
        files = [_ONE]
    if absent := [file for file in files if not (folder / file).exists()]:
        raise FileNotFoundError(f"no safetensors files at {path}: {', '.join(absent)} not found")
    tensors: dict[str, Entry] = {}
    for file in files:
        tensors |= _entries(folder / file)
    if module is not None:
        described = {name: (entry.torch_dtype, entry.shape) for name, entry in tensors.items()}
        tensors = {name: _made(name, made, tensors) for name, made in of_model(module, described).items()}
    sizes = {file: (folder / file).stat().st_size for file in files}
    return folder, Manifest(step=0, seed=0, scale=None, mesh={}, tensors=tensors, files=sizes)


def _indexed(path: Path) -> list[str]:
    """The names of the files that an index lists."""
    try:
        return sorted(set(json.loads(path.read_text())["weight_map"].values()))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path} is no index of safetensors files ({type(error).__name__}: {error})") from error


def _entries(path: Path) -> dict[str, Entry]:
    """The tensors of a file, each as one chunk. Raises `CheckpointError` for a header that contradicts itself or the size."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > size - 8:
            raise CheckpointError(f"{path} is no safetensors file, or was cut: its header would have {length} bytes")
        text = file.read(length)
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        described = {
            name: (each["dtype"], tuple(each["shape"]), *each["data_offsets"]) for name, each in header.items()
        }
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path} is no safetensors file ({type(error).__name__}: {error})") from error
    tensors, begin = {}, 8 + length
    for name, (kind, shape, first, stop) in described.items():
        if kind not in _DTYPES or begin + stop > size:
            raise CheckpointError(f"{path}: {name} has dtype {kind} and ends at byte {begin + stop} of {size}")
        entry = Entry(_DTYPES[kind], shape)
        if first < 0 or stop - first != entry.torch_dtype.itemsize * math.prod(shape):
            raise CheckpointError(
                f"{path}: {name} has shape {list(shape)} of {kind} in {stop - first} bytes at {first}"
            )
        start, whole = begin + first, Window.whole(shape)
        entry.chunks.append(Chunk(path.name, start, stop - first, start, None, whole.first, whole.sizes))
        tensors[name] = entry
    return tensors


def _made(name: str, made: OriginTensor, tensors: Mapping[str, Entry]) -> Entry:
    """The tensor that is made of others of some files."""
    entry = Entry(dtype_name(made.dtype), tuple(made.shape))
    for part in (part for origin in made.origins for part in _in_one_run(origin)):
        source = tensors[part.name]
        if source.dtype != entry.dtype:
            raise TreeError(f"{name} is made of {part.name}, which has dtype {source.dtype}, and of {entry.dtype}")
        (whole,), itemsize = source.chunks, entry.torch_dtype.itemsize
        start = whole.data + itemsize * next(runs(part.held, Window.whole(source.shape)).starts())
        _, first, sizes = part.box
        entry.chunks.append(Chunk(whole.file, start, part.box.numel * itemsize, start, None, first, sizes))
    return entry


def _in_one_run(origin: Origin) -> Iterator[Origin]:
    """The parts of an origin whose elements follow each other in the other tensor."""
    if math.prod(map(len, runs(origin.held, Window.whole(origin.held.shape)).ranges)) <= 1:
        yield origin
        return
    shape, first, sizes = origin.box
    dim = next(dim for dim, size in enumerate(sizes) if size > 1)
    for at in range(first[dim], first[dim] + sizes[dim]):
        row = Window(shape, (*first[:dim], at, *first[dim + 1 :]), (*sizes[:dim], 1, *sizes[dim + 1 :]))
        part = origin.within(row)
        if part is not None:
            yield from _in_one_run(part)
