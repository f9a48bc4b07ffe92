"""Where one parameter lives in each role."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardlib.collectives.styles.base import Style
from shardlib.errors import TreeError, listing
from shardlib.mesh.specs import Leaf
from shardlib.plan.resolved import Resolved
from shardlib.tree import untrained


@dataclass(frozen=True)
class Placement:
    """Where one parameter lives in each role.

    Attributes:
        path: its first path; ``aliases`` are further paths of a tied leaf.
        unit, bucket: the unit and the bucket that hold it.
        compute: as the loss sees it.
        style: how its slices work together, or None.
        param, grad, optimizer: as it is stored; grad and optimizer are None for a leaf that is not trained.
    """

    path: str
    aliases: tuple[str, ...]
    unit: str
    bucket: str
    compute: Leaf
    param: Leaf
    grad: Leaf | None
    optimizer: Leaf | None
    style: Style | None = None


def check_dtypes(placements: Sequence[Placement], resolved: Resolved) -> None:
    """Refuse leaves that could be meant to be trained and would not be, or not well: complex ones, and those of 8 bits."""
    failures = [
        f"{placement.path}: {placement.compute.dtype}; {instead}"
        for placement in placements
        if resolved.use(placement.path).trainable is not False and (instead := untrained(placement.compute.dtype))
    ]
    if failures:
        raise TreeError(
            f"{len(failures)} leaves of dtypes that are not trained:\n{listing(failures)}\nOr leave them as they are, by "
            "sl.freeze(path)."
        )
