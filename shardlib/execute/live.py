"""Counting the bytes of live tensors that operations make."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from shardlib.common._compat import TorchDispatchMode, asks_device, storage_id
from shardlib.tree import leaves_of


@dataclass(frozen=True)
class Peak:
    """The most bytes that were alive at once, and the phase in which they were. Of several phases, the first."""

    bytes: int
    phase: str

    def or_higher(self, other: Peak) -> Peak:
        """The higher of two peaks; of equal ones, this one."""
        return other if other.bytes > self.bytes else self


class LiveBytes(TorchDispatchMode):
    """A mode that counts the storages that operations make, fake ones included, until they are freed. Re-entrant.

    Storages that existed before, and an operation's internal workspace, are not counted.

    Args:
        phase: returns the name of the phase that runs.
    """

    def __init__(self, phase: Callable[[], str] = str) -> None:
        super().__init__()
        self._phase = phase
        self._numbers: dict[int, int] = {}  # identity of a live storage -> its number; −1 if it is not counted
        # The number of a storage, its bytes, negative if it was freed, and the phase in which it was made or freed.
        self._changes: list[tuple[int, int, str]] = []
        self._count = itertools.count()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is asks_device:  # most of what fake tensors dispatch
            return func(*args)
        for value in leaves_of((args, kwargs)):
            self._meet(value, made=False)
        result = func(*args, **(kwargs or {}))
        for value in leaves_of(result):
            self._meet(value, made=True)
        return result

    @property
    def now(self) -> int:
        """Bytes of all counted storages that are alive."""
        return sum(change for _, change, _ in self._changes)

    def peak(self, without: Iterable[torch.Tensor] = ()) -> Peak:
        """The peak, not counting the storages of the tensors in ``without``."""
        ignored = {self._numbers.get(storage_id(tensor.untyped_storage())) for tensor in without}
        counted = ((change, phase) for number, change, phase in self._changes if number not in ignored)
        live, peak = 0, Peak(0, "")
        for change, phase in counted:
            live += change
            if live > peak.bytes:
                peak = Peak(live, phase)
        return peak

    def _meet(self, value: Any, made: bool) -> None:
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.device.type == "meta":
            return  # no storage of its own, or one without memory
        storage = value.untyped_storage()
        key = storage_id(storage)
        if key in self._numbers:
            return
        number, size = (next(self._count), storage.nbytes()) if made else (-1, 0)
        self._numbers[key] = number
        self._changes.append((number, size, self._phase()))
        weakref.finalize(storage, self._free, key, number, size)

    def _free(self, key: int, number: int, size: int) -> None:
        self._numbers.pop(key, None)
        self._changes.append((number, -size, ""))
