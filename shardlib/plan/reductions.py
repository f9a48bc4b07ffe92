"""How sums and gathers travel over the axes of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardlib.collectives.codecs.base import Codec
from shardlib.collectives.codecs.integers import Packing
from shardlib.plan.claims import AxisOwner


@dataclass(frozen=True)
class Reductions:
    """What a step's exchanges go by.

    Attributes:
        codecs: axis -> how gradients travel over it, where that is not as they are.
        packings: axis -> in how many bits parameters travel when they are gathered.
        second_level: the level at which gathered parameters are kept from forward to backward, or None.
        owner: the optimizer that sums over an axis itself, or None.
    """

    codecs: Mapping[str, Codec] = field(default_factory=dict)
    packings: Mapping[str, Packing] = field(default_factory=dict)
    second_level: int | None = None
    owner: AxisOwner | None = field(default=None, compare=False)  # of the optimizer, not of the layout
