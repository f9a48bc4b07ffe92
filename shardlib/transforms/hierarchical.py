"""A second shard of the parameters inside a node (ZeRO++'s hierarchical partitioning, arXiv 2306.10209, section 3.2)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shardlib.plan.claims import Claim, LeafInfo, Live


@dataclass(frozen=True)
class Hierarchical:
    axis: str

    @property
    def name(self) -> str:
        return f"hierarchical(axis={self.axis!r})"

    def claims(self, sizes: Mapping[str, int], leaves: Sequence[LeafInfo]) -> Iterable[Claim]:
        yield Live("second", self.axis)


def hierarchical(axis: str = "local") -> Hierarchical:
    """Keep a second shard of the parameters, split over ``axis`` alone, from a micro-batch's forward to its backward.

    For parameters that are split over the axis between nodes and over ``axis`` inside one: ``chain(zero(3, axis="node"),
    zero(3, axis="local"), hierarchical("local"))``. Forward gathers across nodes first, what arrives is kept, and backward
    gathers inside the node alone. Costs the unit's parameters divided by the axis' size, for every unit, meanwhile.

    Raises:
        IllegalComposition: when a plan is made: parameters are not split over ``axis``, or over no other.

    >>> two = sl.chain(sl.zero(3, axis="node"), sl.zero(3, axis="local"), sl.hierarchical("local"))
    >>> sl.make_plan({"w": torch.ones(8, 8)}, sl.abstract_mesh(node=2, local=4), two).payload()
    {'node': 64, 'local': 576}
    """
    return Hierarchical(axis)
