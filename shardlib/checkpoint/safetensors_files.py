"""Files of the safetensors format, as transformers names them.

A file begins with the length of a JSON header (8 bytes, little-endian); then come the header (name -> dtype, shape, first and
last byte) and the elements. Since all sizes are known beforehand, every rank writes and reads its own ranges.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shardlib.checkpoint.agreement import from_first_rank, on_all_ranks
from shardlib.checkpoint.dotted import check_apart, dotted, dotted_names
from shardlib.checkpoint.fragments import BUFFERS, PARAMS, Fragment, boxes, owned_params, runs, source_of, whole
from shardlib.checkpoint.importing import fill_params, require_params
from shardlib.checkpoint.manifest import Chunk, Entry, Manifest
from shardlib.checkpoint.reading import BUFFER, TensorsOnDisk, open_checkpoint
from shardlib.checkpoint.writing import bytes_of, write_all
from shardlib.common.disk import sync_folder
from shardlib.common.tensors import dtype_name
from shardlib.errors import CheckpointError, TreeError, listing
from shardlib.mesh.specs import Window
from shardlib.models.huggingface.conversion import Described, Origin, OriginTensor, of_files, of_model
from shardlib.sharded.tree import Sharded

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


def laid_out(described: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], limit: int = SHARD) -> dict[str, Place]:
    """The place of each tensor, header included."""
    groups: list[list[str]] = [[]]
    size = 0
    for name, (dtype, shape) in described.items():
        length = dtype.itemsize * math.prod(shape)
        if groups[-1] and size + length > limit:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += length
    tensors = {}
    for number, group in enumerate(groups, 1):
        file = _ONE if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        begin = len(_header({name: described[name] for name in group}))
        for name in group:
            dtype, shape = described[name]
            tensors[name] = Place(file, begin, dtype, shape)
            begin += dtype.itemsize * math.prod(shape)
    return tensors


def _header(described: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in described.items():
        begin, end = end, end + dtype.itemsize * math.prod(shape)
        short = _NAMES.get(dtype_name(dtype))
        if short is None:
            raise TreeError(f"{name}: safetensors files have no {dtype}; cast it")
        entries[name] = {"dtype": short, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def begin(folder: Path, tensors: Mapping[str, Place]) -> None:
    """Make the files, with their headers, under names of their own until they are complete."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in dict.fromkeys(tensor.file for tensor in tensors.values()):
        held = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items() if tensor.file == file}
        fd = os.open(folder / f"{file}.partial", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            write_all(fd, [_header(held)], 0)
        finally:
            os.close(fd)


def write(
    folder: Path, tensors: Mapping[str, Place], fragments: Iterator[Fragment], held: Mapping[str, Sequence[Origin]]
) -> None:
    """Write fragments to their places.

    Args:
        held: a fragment's name -> boxes of its tensor, and the boxes of ``tensors`` that hold them.
    """
    opened: dict[str, int] = {}
    try:
        for fragment in fragments:
            values, first = fragment.data.cpu(), 0
            for box in boxes(fragment.window, fragment.start, fragment.stop):
                view = values[first : first + box.numel].view(box.sizes)
                first += box.numel
                for part in (part for origin in held[fragment.name] if (part := origin.within(box))):
                    tensor = tensors[part.name]
                    if tensor.file not in opened:
                        opened[tensor.file] = os.open(folder / f"{tensor.file}.partial", os.O_WRONLY)
                    _write_box(opened[tensor.file], tensor, part.held, part.box.inside(box).of(view))
        for fd in opened.values():
            os.fsync(fd)
    finally:
        for fd in opened.values():
            os.close(fd)


def _write_box(fd: int, tensor: Place, box: Window, values: torch.Tensor) -> None:
    memory, itemsize, first = bytes_of(values.contiguous().reshape(-1)), tensor.dtype.itemsize, 0
    found = runs(box, Window.whole(tensor.shape))
    for start in found.starts():
        run = memory[first : first + found.length * itemsize]
        write_all(fd, [run], tensor.offset + start * itemsize)
        first += run.nbytes


def finish(folder: Path, files: Sequence[str], tensors: Mapping[str, Place]) -> None:
    """Give the files their names, and write the index of several."""
    sync_folder(folder)
    for file in files:
        os.replace(folder / f"{file}.partial", folder / file)
    index = folder / _INDEX
    if files == [_ONE]:
        index.unlink(missing_ok=True)
    else:
        sizes = [tensor.dtype.itemsize * math.prod(tensor.shape) for tensor in tensors.values()]
        counts = sum(math.prod(tensor.shape) for tensor in tensors.values())
        facts = {
            "metadata": {"total_parameters": counts, "total_size": sum(sizes)},
            "weight_map": {name: tensor.file for name, tensor in tensors.items()},
        }
        index.write_text(json.dumps(facts, indent=2))
        (folder / _ONE).unlink(missing_ok=True)
    sync_folder(folder)


def opened(path: Path, module: Any = None) -> tuple[Path, Manifest]:
    """The folder and the tensors of safetensors files; with a model of transformers the model's tensors, by its names."""
    folder = path if path.is_dir() else path.parent
    if path.is_file():
        files = [path.name]
    elif (path / _INDEX).exists():
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
    """The tensors of a file, each as one chunk.

    Raises:
        CheckpointError: the header is none, or contradicts itself or the file's size.
    """
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
                f"{path}: {name} has shape {list(shape)} of {kind}, and {stop - first} bytes from {first}"
            )
        entry.chunks.append(
            Chunk(path.name, begin + first, stop - first, begin + first, None, (0,) * len(shape), shape)
        )
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
        entry.chunks.append(
            Chunk(whole.file, start, part.box.numel * itemsize, start, None, part.box.first, part.box.sizes)
        )
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


# Parameters in files of the safetensors format, in the layout and with the names of transformers.


def export_safetensors(
    folder: str | Path,
    params: Sharded,
    *,
    module: Any = None,
    max_shard_size: int = SHARD,
    buffers: Mapping[str, torch.Tensor | None] | None = None,
) -> None:
    """Write parameters as transformers' ``save_pretrained`` does: ``model.safetensors``, or several files and an index. Every
    rank must call it.

    Each rank writes what it holds; none gathers anything. Names are paths with dots (``model.layers.0.mlp.up_proj.weight``),
    so that parameters of `from_module` have the module's names; a tied parameter has all of its names. With ``module`` names
    and layout are those that transformers gives the model's files: Mixtral's have a tensor for each matrix of each expert.
    Write the configuration beside it with ``model.config.save_pretrained(folder)`` on one rank, and
    ``from_pretrained(folder)`` loads the model.

    Args:
        folder: a folder that all ranks see; made if it is not there. Files of these names in it are replaced.
        module: the model of transformers that `from_module` was given, on any device; its values are not read.
        max_shard_size: bytes of a file at most; a larger tensor has a file of its own.
        buffers: further tensors, equal on all ranks, such as a module's buffers; with ``module`` those of its state dict are
            written.

    Raises:
        TreeError: ``params`` are gradients, or are not those of ``module``; leaves have one name with dots; buffers in its
            state dict are not given; transformers changes tensors in its files in another way than by joining and cutting
            them.
        TypeError: ``params`` are not sharded.

    >>> params = sl.shard({"layer": {"weight": torch.ones(2, 3)}}, sl.make_mesh())
    >>> sl.checkpoint.export_safetensors("model", params)
    >>> sorted(sl.checkpoint.import_safetensors("model", params)["layer"])
    ['weight']
    """
    if require_params("export_safetensors", params).role != "param":
        raise TreeError("export_safetensors: these are gradients, not parameters; give state.params")
    folder, mesh = Path(folder), params.mesh
    extra = {name: leaf for name, leaf in (buffers or {}).items() if leaf is not None}
    if module is not None:
        extra = {name: leaf for name, leaf in extra.items() if name in module.state_dict()}
    names = dotted_names(params.plan, buffers=extra)
    leaves = _described(params, names) | {name: (leaf.dtype, tuple(leaf.shape)) for name, leaf in extra.items()}
    made = _unchanged(leaves) if module is None else of_files(module, leaves)
    tensors = laid_out({name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in made.items()}, max_shard_size)
    files = list(dict.fromkeys(tensor.file for tensor in tensors.values()))
    on_all_ranks(mesh, lambda: begin(folder, tensors) if mesh.rank == 0 else None)

    def fragments() -> Iterator[Fragment]:
        for fragment in owned_params(params):
            for name in names[fragment.name.removeprefix(PARAMS)]:
                yield fragment._replace(name=name)
        if mesh.rank == 0:
            yield from (whole(leaf, name) for name, leaf in extra.items())

    on_all_ranks(mesh, lambda: write(folder, tensors, fragments(), _held(made)))
    on_all_ranks(mesh, lambda: finish(folder, files, tensors) if mesh.rank == 0 else None)


def import_safetensors(
    folder: str | Path,
    params: Sharded,
    *,
    module: Any = None,
    buffers: Mapping[str, torch.Tensor | None] | None = None,
    partial: Sequence[str] = (),
) -> Sharded:
    """Fill parameters from the safetensors files of a folder (``model.safetensors``, or those of an index), or from one file.
    Every rank must call it, and reads the bytes of its shards only.

    Args:
        params: the layout; its memory is reused, and its dtypes are kept.
        module: the model of transformers that `from_module` was given, on any device, for files with the names and layout
            that transformers gives them (`from_pretrained` builds the model as well); by default names are paths with dots.
        buffers: name -> a module's buffer, of which those in the files are filled too, in place, on every rank.
        partial: globs over names (with dots) that may be missing in the files or in ``params``, or have other shapes.
            Parameters that the files lack keep their values.

    Returns:
        ``params``.

    Raises:
        FileNotFoundError: there are no such files.
        CheckpointError: a file is not of the format, or cut.
        TreeError: names or shapes differ, or the values for leaves that are tied; lists all of them. ``params`` are
            unchanged.
        TypeError: ``params`` are not sharded.

    >>> params = sl.shard({"layer": {"weight": torch.ones(2, 3)}}, sl.make_mesh())
    >>> sl.checkpoint.export_safetensors("model", params)
    >>> empty = sl.shard({"layer": {"weight": torch.zeros(2, 3)}}, sl.make_mesh())
    >>> sl.checkpoint.import_safetensors("model", empty)["layer"]["weight"].sum()
    tensor(6.)
    """
    mesh = require_params("import_safetensors", params).mesh
    with TensorsOnDisk(*from_first_rank(mesh, lambda: opened(Path(folder), module), folder)) as saved:
        fill_params(saved, params, "", partial, buffers or {})
    return params


def _described(params: Sharded, names: Mapping[str, Sequence[str]]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Name -> dtype and shape of every parameter, of other stages too, in the order of their files."""
    return {
        name: (placement.param.dtype, placement.param.shape)
        for placement in params.plan.everywhere.placements
        for name in names[placement.path]
    }


def _unchanged(leaves: Described) -> dict[str, OriginTensor]:
    """The tensors of files that have the leaves as they are."""
    return {name: OriginTensor.whole(name, *described) for name, described in leaves.items()}


def _held(made: Mapping[str, OriginTensor]) -> dict[str, list[Origin]]:
    """A leaf's name -> its boxes, and the boxes of the files' tensors that hold them."""
    held: dict[str, list[Origin]] = {}
    for name, tensor in made.items():
        for origin in tensor.origins:
            held.setdefault(origin.name, []).append(origin.inverse(name))
    return held


def convert(checkpoint: Path, folder: Path, prefix: str = "", dtype: torch.dtype | None = None) -> list[str]:
    """Write the parameters of a checkpoint on the disk as `export_safetensors` does, without a model, a part at a time.

    Every byte of the parameters is verified first. Another dtype than a parameter's own is rounded from its fp32 master, if
    there is one.

    Args:
        prefix: what names in the files begin with, before the parameter's path with dots.
        dtype: of floating-point parameters; by default each one's own.

    Returns:
        The names of the model's buffers in the checkpoint, which are no parameters and not written.

    Raises:
        CheckpointError: the checkpoint is damaged.
        TreeError: parameters have one name with dots.
    """
    with open_checkpoint(checkpoint) as whole_checkpoint:
        every = whole_checkpoint.tensors
    check_apart(name.removeprefix(PARAMS) for name in every if name.startswith(PARAMS))
    described, source = {}, {}
    for name in (name for name in every if name.startswith(PARAMS)):
        theirs = prefix + dotted(name.removeprefix(PARAMS))
        kind = every[name].torch_dtype
        kind = dtype if dtype is not None and kind.is_floating_point else kind
        source[theirs] = name if kind == every[name].torch_dtype else source_of(name, every)
        described[theirs] = (kind, every[name].shape)
    places = laid_out(described)
    held = replace(whole_checkpoint.manifest, tensors={name: every[name] for name in source.values()})

    def fragments() -> Iterator[Fragment]:
        for theirs, name in source.items():
            entry = held.tensors[name]
            part = BUFFER() // entry.torch_dtype.itemsize
            numel = math.prod(entry.shape)
            for start in range(0, numel, part):
                data = torch.empty(min(part, numel - start), dtype=entry.torch_dtype)
                fragment = Fragment(theirs, start, data, Window.whole(entry.shape))
                saved.fill(fragment, name)
                yield fragment._replace(data=data.to(places[theirs].dtype))

    kept = _held(_unchanged(described))
    with TensorsOnDisk(checkpoint, held) as saved:
        if damages := saved.damages():
            raise CheckpointError(f"{checkpoint} is damaged:\n{listing(damages)}\nExport an older checkpoint")
        begin(folder, places)
        write(folder, places, fragments(), kept)
    finish(folder, list(dict.fromkeys(place.file for place in places.values())), places)
    return [name for name in every if name.startswith(BUFFERS)]
