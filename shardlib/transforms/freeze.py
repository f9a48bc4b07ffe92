"""Leaves that are used and not trained."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shardlib.claims import Claim, LeafInfo, Use
from shardlib.errors import IllegalComposition


@dataclass(frozen=True)
class Freeze:
    globs: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"freeze({', '.join(map(repr, self.globs))})"

    def claims(self, sizes: Mapping[str, int], leaves: Sequence[LeafInfo]) -> Iterable[Claim]:
        for pattern in self.globs:
            if not any(leaf.matches(pattern) for leaf in leaves):
                shown = ", ".join(leaf.path for leaf in leaves[:5])
                raise IllegalComposition(f"freeze({pattern!r}) matches no parameter; paths look like {shown}")
        for leaf in leaves:
            if leaf.matches(self.globs):
                yield Use(leaf.path, trainable=False)


def freeze(globs: str | Sequence[str]) -> Freeze:
    """Do not train the leaves whose path matches: no gradient, no optimizer state. They are still sharded.

    Args:
        globs: one or several patterns over paths such as ``"blocks/0/*"`` (``*`` crosses ``/``).
    """
    return Freeze((globs,) if isinstance(globs, str) else tuple(globs))
