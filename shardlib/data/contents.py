"""Checksums of what values hold, by which another dataset or function is told from the same one."""

from __future__ import annotations

import hashlib
import pickle
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any

import torch

from shardlib.common.tensors import raw_bytes


class Contents:
    """A checksum of values, in the order in which they are added. Functions count by their code and what they close over,
    tensors by their elements."""

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=16)
        self._whole = True

    def add(self, value: Any) -> None:
        """Add a value."""
        try:
            _Writing(SimpleNamespace(write=self._digest.update)).dump(value)
        except Exception:  # what the value's own classes raise where they cannot be written
            self._whole = False

    @property
    def checksum(self) -> str | None:
        """The checksum; None if a value cannot be written, and so not be recognised."""
        return self._digest.hexdigest() if self._whole else None


class _Writing(pickle.Pickler):
    """Values as bytes, which are never read."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            elements = raw_bytes(value.cpu().contiguous())
            return tuple, ((str(value.dtype), tuple(value.shape), elements.numpy().tobytes()),)
        if isinstance(value, FunctionType):
            held = [cell.cell_contents for cell in value.__closure__ or ()]
            return tuple, ((value.__code__, value.__defaults__, value.__kwdefaults__, held),)
        if isinstance(value, CodeType):
            return tuple, ((value.co_code, value.co_names, value.co_consts),)
        return NotImplemented


class Watched:
    """A dataset, with a checksum of the samples that are read of it.

    Attributes:
        contents: the checksum.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset, self.contents = dataset, Contents()
        if hasattr(dataset, "rows_at"):
            self.rows_at = lambda indices: self._seen(dataset.rows_at(indices))

    def __getitem__(self, index: int) -> Any:
        return self._seen(self._dataset[index])

    def _seen(self, read: Any) -> Any:
        self.contents.add(read)
        return read
