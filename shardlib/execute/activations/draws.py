"""Random numbers of blocks that are computed twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardlib.common._compat import no_modes
from shardlib.rng import restore_generators, states_of_generators

States = list[tuple[torch.Generator, torch.Tensor]]


class Draws:
    """The states of torch's generators before each block. They are kept once for blocks in which none is drawn from, so that
    host memory for them does not grow with the number of blocks."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: States = []

    def repeated(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """``fn``, of which every call after the first draws what the first one drew, and leaves generators as they are."""
        first: States = []

        def call(*args: Any, **kwargs: Any) -> Any:
            if not first:
                first.extend(self._noted())
                return fn(*args, **kwargs)
            present = states_of_generators(self._device)
            restore_generators(first)
            try:
                return fn(*args, **kwargs)
            finally:
                restore_generators(present)

        return call

    def _noted(self) -> States:
        present = states_of_generators(self._device)
        with no_modes():  # a trace has no values
            if not (self._last and all(map(_equal, present, self._last))):
                self._last = present
        return self._last


def _equal(state: tuple[torch.Generator, torch.Tensor], other: tuple[torch.Generator, torch.Tensor]) -> bool:
    return state[0] is other[0] and torch.equal(state[1], other[1])
