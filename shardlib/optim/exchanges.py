"""The exchanges of an update that all ranks make, also one whose update fails on its way."""

from __future__ import annotations


class Exchanges:
    """A count of the exchanges of one update, by which a rank that fails in it makes those that other ranks wait for.

    Attributes:
        repeated: whether the update is made once more, for the exchanges that were left out: what it computes is nobody's.
    """

    def __init__(self) -> None:
        self._made = self._left_out = 0
        self.repeated = False

    def begin(self) -> None:
        """Count from 0."""
        self._made = self._left_out = 0
        self.repeated = False

    def again(self) -> None:
        """Leave out those that were made: the update is made once more."""
        self._left_out, self._made = self._made, 0
        self.repeated = True

    def due(self) -> bool:
        """Whether the next exchange is to be made."""
        self._made += 1
        return self._made > self._left_out
