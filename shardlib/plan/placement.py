"""What a plan is made of: where a parameter lives, what a stage does, what an optimizer sums itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardlib.collectives.codecs.base import Codec
from shardlib.collectives.styles.base import Style
from shardlib.errors import TreeError, listing
from shardlib.mesh.specs import Leaf
from shardlib.plan.claims import Slots
from shardlib.tree import untrained


@dataclass(frozen=True)
class OwnedAxis:
    """An axis over which the optimizer sums gradients itself, in few bits, once it has got that far.

    ``by`` names the optimizer.
    """

    axis: str
    codec: Codec
    by: str


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


@dataclass(frozen=True)
class StageTrace:
    """What one micro-batch does in one stage.

    Attributes:
        touches: units in the order it gathers them.
        forward, backward: bytes of the carry it passes on, and of the gradient that comes back for it.
        activations: payload bytes that its blocks send themselves, by axis.
        kept: bytes that it keeps of the micro-batch from its forward to its backward, the carry that came in included.
        live: bytes that it holds at most while it computes, gradients aside.
    """

    touches: tuple[str, ...]
    forward: int
    backward: int
    activations: Mapping[str, int]
    kept: int = 0
    live: int = 0


def check_dtypes(placements: Sequence[Placement], slots: Slots) -> None:
    """Refuse leaves that could be meant to be trained and would not be, or not well: complex ones, and those of 8 bits."""
    failures = [
        f"{placement.path}: {placement.compute.dtype}; {instead}"
        for placement in placements
        if slots.get(("use", placement.path, "trainable"), True) and (instead := untrained(placement.compute.dtype))
    ]
    if failures:
        raise TreeError(
            f"{len(failures)} leaves of dtypes that are not trained:\n{listing(failures)}\nOr leave them as they are, by "
            "sl.freeze(path)."
        )
