"""Items: a chunk of a tensor in the bytes that `torch.save` would write, which `torch.distributed.checkpoint` reads.

An item is an uncompressed zip file of a pickle that describes a tensor, and of its elements. All but the elements follows
from dtype and sizes, so an item is written as head, elements, tail, without a copy of the elements.
"""

from __future__ import annotations

import functools
import math
import struct
import sys

import torch

from shardlib.common._compat import pickled_tensor

ALIGNMENT = 64  # bytes: the elements of an item begin at a multiple in the file
_ROOT = "item"  # torch takes the first folder of a zip file, whatever its name, for the root
_LOCAL, _ENTRY, _END = struct.Struct("<4s5H3L2H"), struct.Struct("<4s6H3L5H2L"), struct.Struct("<4s4H2LH")
_PADDING = struct.Struct("<2s1H")  # an extra field, which zip files may have for any purpose


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
    last = _entry(name, length, len(start))
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
        directory += _entry(path, len(content), len(start))
        start += _local(path, len(content), b"") + content
    return start, directory


def _local(name: bytes, length: int, extra: bytes) -> bytes:
    return _LOCAL.pack(b"PK\3\4", 0, 0, 0, 0, 0, 0, length, length, len(name), len(extra)) + name + extra


def _entry(name: bytes, length: int, at: int) -> bytes:
    return _ENTRY.pack(b"PK\1\2", 0, 0, 0, 0, 0, 0, 0, length, length, len(name), 0, 0, 0, 0, 0, at) + name
