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

    def batch(self) -> Microbatches:
        """The batch of those that wait, which no longer do: each as ``(1.0, part)``. An epoch may end with fewer; then
        copies stand for the others, as ``(0.0, part)``, which are to weigh nothing."""
        parts, self._parts = self._parts, []
        marked = [*((1.0, part) for part in parts), *[(0.0, parts[0])] * (self._count - len(parts))]
        return Microbatches(tuple(marked))
