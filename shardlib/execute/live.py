"""Counting the bytes of live tensors that operations make."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from shardlib.common._compat import OperatorMode, storage_id
from shardlib.execute.phases import Phase
from shardlib.tree import leaves_of


class Stretch(NamedTuple):
    """A stretch of time in one phase.

    Attributes:
        rise: the most bytes that were alive at once, beyond those that were when the stretch began; at least 0.
        net: bytes alive at its end, beyond the same.
    """

    phase: Phase
    rise: int
    net: int


class LiveBytes(OperatorMode):
    """A mode that counts the storages that operations make, fake ones included, until they are freed. Re-entrant.

    Storages that existed before, and an operation's internal workspace, are not counted.

    Args:
        phase: returns the phase that runs.
    """

    def __init__(self, phase: Callable[[], Phase] = Phase) -> None:
        super().__init__()
        self._phase = phase
        self._numbers: dict[int, int] = {}  # identity of a live storage -> its number; −1 if it is not counted
        # The number of a storage, its bytes, negative if it was freed, and the phase in which it was made or freed.
        self._changes: list[tuple[int, int, Phase]] = []
        self._count = itertools.count()

    def _take(self, func: Any, args: Any, kwargs: Any) -> Any:
        for value in leaves_of((args, kwargs)):
            self._meet(value, made=False)
        result = func(*args, **kwargs)
        # A constant that the function closes over is fake from its first view on, whose storage then is another one.
        for value in leaves_of(result):
            self._meet(value, made=not func.is_view)
        return result

    @property
    def now(self) -> int:
        """Bytes of all counted storages that are alive."""
        return sum(change for _, change, _ in self._changes)

    @property
    def peak(self) -> int:
        """The most bytes of counted storages that were alive at once."""
        return max(itertools.accumulate((change for _, change, _ in self._changes), initial=0))

    def stretches(self, without: Iterable[torch.Tensor] = ()) -> list[Stretch]:
        """What happened, phase after phase, not counting the storages of the tensors in ``without``."""
        ignored = {self._numbers.get(storage_id(tensor.untyped_storage())) for tensor in without}
        counted = ((phase, change) for number, change, phase in self._changes if number not in ignored)
        found = []
        for phase, changes in itertools.groupby(counted, key=lambda change: change[0]):
            levels = list(itertools.accumulate((change for _, change in changes), initial=0))
            found.append(Stretch(phase, max(levels), levels[-1]))
        return found

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
        self._changes.append((number, -size, self._phase()))
