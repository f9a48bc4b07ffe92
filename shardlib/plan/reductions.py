"""The forms of sums and gathers, axis by axis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardlib.collectives.codecs.base import Codec
from shardlib.collectives.codecs.integers import Packing
from shardlib.collectives.summation import IN_FLOAT64, Summation
from shardlib.plan.claims import AxisOwner


@dataclass(frozen=True)
class Reductions:
    """What decides the exchanges of a step, besides the buckets.

    Attributes:
        codecs: axis -> codec of gradients, for axes that have one.
        packings: axis -> codec of gathered parameters, for axes on which they are compressed.
        second_level: the level of the second shard of the parameters, kept from forward to backward; None without one.
        owner: the optimizer that sums over an axis itself, or None.
        summation: how losses, weights and norms are summed.
    """

    codecs: Mapping[str, Codec] = field(default_factory=dict)
    packings: Mapping[str, Packing] = field(default_factory=dict)
    second_level: int | None = None
    owner: AxisOwner | None = field(default=None, compare=False)  # of the optimizer, not of the layout
    summation: Summation = IN_FLOAT64
