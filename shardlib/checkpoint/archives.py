"""Files of `torch.save`, read without running what they say: tensors become the places of their elements.

Such a file is an uncompressed zip file of a pickle and of each storage's bytes. The pickle may name any function of any
module. Here plain containers are made, and functions that rebuild tensors are replaced; objects of other classes are left
out, where the caller knows these classes, and else refused.
"""

from __future__ import annotations

import collections
import io
import math
import pickle
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple

import torch

from shardlib.errors import CheckpointError, listing
from shardlib.tree import matches

_PLAIN = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("torch", "Size"): torch.Size,
    ("builtins", "set"): set,
}
_TYPES = {("torch", "Tensor"), ("torch.nn.parameter", "Parameter")}  # of tensors with attributes, which are left out
_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}


class Stored(NamedTuple):
    """A tensor of a file.

    Attributes:
        file: the file's name.
        data: where the first element begins in it.
        contiguous: whether the elements follow each other.
    """

    file: str
    data: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    contiguous: bool

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def load(path: Path, left_out: Sequence[str] = ()) -> Any:
    """What `torch.save` wrote, with a `Stored` in place of each tensor; no element is read. Raises `CheckpointError` for a
    file that is cut or in another format, or names further classes or functions.

    Args:
        left_out: globs over the full names of classes whose objects are replaced by a `LeftOut`.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
            order = archive.read(entries["byteorder"]).decode() if "byteorder" in entries else sys.byteorder
            content = archive.read(entries["data.pkl"])
    except (zipfile.BadZipFile, KeyError) as error:
        raise CheckpointError(f"{path} is no file of torch.save, or was cut ({error!r})") from error
    if order != sys.byteorder:
        raise CheckpointError(f"{path} was written on a machine with {order}-endian numbers")
    with open(path, "rb") as file:
        unpickler = _Unpickler(io.BytesIO(content), path, file, entries, left_out)
        found = unpickler.load()
    if unpickler.refused:
        raise CheckpointError(
            f"{path} names classes or functions that tensors do not need, so that it is not trusted:\n"
            f"{listing(sorted(unpickler.refused))}\nName in left_out= those that are not looked at"
        )
    return found


def number(folder: Path, value: Any) -> float:
    """A number of a file, which may be a tensor of one element."""
    if not isinstance(value, Stored):
        return value
    with open(folder / value.file, "rb") as file:
        file.seek(value.data)
        return torch.frombuffer(bytearray(file.read(value.dtype.itemsize)), dtype=value.dtype).item()


def data_at(file: IO[bytes], path: Path, entry: zipfile.ZipInfo) -> int:
    """Where an entry's bytes begin in a zip file."""
    if entry.compress_type != zipfile.ZIP_STORED:
        raise CheckpointError(f"{path}: {entry.filename} is compressed; save it without extensions")
    file.seek(entry.header_offset + 26)  # the lengths of the entry's name and extra field
    lengths = file.read(4)
    return entry.header_offset + 30 + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")


class LeftOut:
    """What stands for an object that is not made. It takes what a pickle gives to an object, and keeps none of it."""

    def __new__(cls, *args: Any, **kwargs: Any) -> LeftOut:
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def __setstate__(self, state: Any) -> None: ...
    def __setitem__(self, key: Any, value: Any) -> None: ...
    def append(self, item: Any) -> None: ...
    def add(self, item: Any) -> None: ...


class _Storage(NamedTuple):
    """Where a storage begins, and its dtype; None for bytes, of which tensors say the dtype."""

    data: int
    dtype: torch.dtype | None


class _Unpickler(pickle.Unpickler):
    """An unpickler that makes containers, numbers, text and `Stored`, and nothing else; ``refused`` is what else is named."""

    def __init__(
        self,
        pickled: BinaryIO,
        path: Path,
        file: BinaryIO,
        entries: dict[str, zipfile.ZipInfo],
        left_out: Sequence[str],
    ) -> None:
        super().__init__(pickled)
        self.refused: set[str] = set()
        self._path, self._file, self._entries, self._left_out = path, file, entries, left_out

    def find_class(self, module: str, name: str) -> Any:
        known = _PLAIN.get((module, name))
        if known is not None:
            return known
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) == ("torch.storage", "UntypedStorage"):
            return None
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        rebuild = {
            "torch._utils._rebuild_tensor_v2": self._tensor,
            "torch._utils._rebuild_tensor_v3": self._of_bytes,
            "torch._utils._rebuild_parameter": lambda tensor, *_: tensor,
            "torch._tensor._rebuild_from_type_v2": lambda rebuild, kind, arguments, *_: rebuild(*arguments),
        }.get(f"{module}.{name}")
        if rebuild is not None:
            return rebuild
        if (module, name) not in _TYPES and not matches(f"{module}.{name}", self._left_out):
            self.refused.add(f"{module}.{name}")
        return LeftOut

    def persistent_load(self, pid: Any) -> _Storage:
        _, dtype, key, *_ = pid
        return _Storage(data_at(self._file, self._path, self._entries[f"data/{key}"]), dtype)

    def _tensor(
        self, storage: _Storage, offset: int, shape: Sequence[int], stride: Sequence[int], *_: Any, dtype: Any = None
    ) -> Stored:
        kind: torch.dtype | None = dtype or storage.dtype
        assert kind is not None  # storages of bytes come with tensors that say the dtype
        data = storage.data + offset * kind.itemsize
        return Stored(self._path.name, data, kind, tuple(shape), _contiguous(shape, stride))

    def _of_bytes(
        self, storage: _Storage, offset: int, shape: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, *_: Any
    ) -> Stored:
        return self._tensor(storage, offset, shape, stride, dtype=dtype)


def _contiguous(shape: Sequence[int], stride: Sequence[int]) -> bool:
    step = 1
    for size, found in reversed(list(zip(shape, stride, strict=True))):
        if size != 1 and found != step:
            return 0 in shape
        step *= size
    return True
