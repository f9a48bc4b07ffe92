"""`Tally`: what was counted of experts that come to the device."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tally:
    """Numbers of experts, counted once for each layer and step that uses them.

    Attributes:
        used: experts that had tokens.
        misses: those of them that were neither on the device nor on their way when their layer began.
        ahead: experts that were fetched ahead, because the router of the layer before named them.
        right: those of them that their layer then used.
        bytes: of all that were fetched.
    """

    used: int = 0
    misses: int = 0
    ahead: int = 0
    right: int = 0
    bytes: int = 0

    @property
    def hits(self) -> int:
        """Experts with tokens that were on the device, or on their way."""
        return self.used - self.misses

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.used + other.used,
            self.misses + other.misses,
            self.ahead + other.ahead,
            self.right + other.right,
            self.bytes + other.bytes,
        )
