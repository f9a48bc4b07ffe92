"""Micro-batches that a loop hands over one by one, and that make one batch of a step."""

from __future__ import annotations

from typing import Any

from shardlib.execute.batches import Microbatches


class Waiting:
    """The micro-batches of the step that comes next.

    Args:
        count: of a step.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._parts: list[Any] = []

    def add(self, part: Any) -> None:
        self._parts.append(part)

    def clear(self) -> int:
        """Forget those that wait; returns how many there were."""
        count = len(self._parts)
        self._parts = []
        return count

    def batch(self) -> Microbatches:
        """The batch of those that wait, which no longer do: each as ``(True, part)``. An epoch may end with fewer; then
        ``(False, part)`` stands for each of the others, which is to be left out."""
        parts, self._parts = self._parts, []
        marked = [*((True, part) for part in parts), *[(False, parts[0])] * (self._count - len(parts))]
        return Microbatches(tuple(marked))
