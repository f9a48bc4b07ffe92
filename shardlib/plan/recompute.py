"""How blocks are recomputed in backward, and where what they are recomputed from is kept meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

SMALLEST = 1 << 16  # bytes; the latency of moving less costs more than its memory is worth


@dataclass(frozen=True)
class Recompute:
    """How blocks are recomputed in backward.

    Attributes:
        policy: "full", "dots" or a policy function.
        host: whether inputs of blocks are kept in host memory.
        smallest: bytes below which an input stays where it is.
    """

    policy: str | Callable[..., Any]
    host: bool = False
    smallest: int = SMALLEST

    @property
    def arguments(self) -> str:
        """The arguments of `shardlib.remat` that differ from their defaults."""
        shown = [repr(getattr(self.policy, "__name__", self.policy))]
        shown += ["store='host'"] if self.host else []
        shown += [f"smallest={self.smallest}"] if self.smallest != SMALLEST else []
        return ", ".join(shown)

    def __str__(self) -> str:
        policy = getattr(self.policy, "__qualname__", self.policy)
        return f"{policy}, from inputs in host memory" if self.host else str(policy)
