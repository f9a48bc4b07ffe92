"""Bytes of the tensors that operations make, while they are alive."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from shardlib._compat import TorchDispatchMode, pytree, storage_id


class LiveBytes(TorchDispatchMode):
    """Follows the storages that operations within make, fake ones too, until they are freed; it may be entered again.

    What was there before, and what an operation needs only inside itself, is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self._numbers: dict[int, int] = {}  # of the storages that are alive, by identity; −1 for those from elsewhere
        self._changes: list[tuple[int, int]] = []  # a storage's number, and the bytes that came or went with it
        self._count = itertools.count()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in pytree.tree_leaves((args, kwargs)):
            self._meet(value, made=False)
        result = func(*args, **(kwargs or {}))
        for value in pytree.tree_leaves(result):
            self._meet(value, made=True)
        return result

    @property
    def now(self) -> int:
        """Bytes that are alive."""
        return sum(change for _, change in self._changes)

    def peak(self, without: Iterable[torch.Tensor] = ()) -> int:
        """Most bytes that were alive at once, those aside of the storages behind some tensors."""
        aside = {self._numbers.get(storage_id(tensor.untyped_storage())) for tensor in without}
        return max(
            itertools.accumulate(0 if number in aside else change for number, change in self._changes), default=0
        )

    def _meet(self, value: Any, made: bool) -> None:
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.device.type == "meta":
            return  # no storage of its own, or one without memory
        storage = value.untyped_storage()
        key = storage_id(storage)
        if key in self._numbers:
            return
        number, size = (next(self._count), storage.nbytes()) if made else (-1, 0)
        self._numbers[key] = number
        self._changes.append((number, size))
        weakref.finalize(storage, self._free, key, number, size)

    def _free(self, key: int, number: int, size: int) -> None:
        self._numbers.pop(key, None)
        self._changes.append((number, -size))
