"""A second shard of the parameters inside a node (ZeRO++'s hierarchical partitioning, arXiv 2306.10209, section 3.2)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shardlib.errors import IllegalComposition, axes_named
from shardlib.plan.arguments import axis_of
from shardlib.plan.claims import SECOND, Claim, LeafInfo, Live
from shardlib.plan.code import CodeCall, CodedTransform
from shardlib.plan.transform import Resolved


@dataclass(frozen=True, repr=False)
class Hierarchical(CodedTransform):
    """The transform that `hierarchical` makes, with the arguments given there."""

    axis: str

    @property
    def call(self) -> CodeCall:
        return CodeCall(hierarchical, vars(self))

    def claims(self, sizes: Mapping[str, int], leaves: Sequence[LeafInfo]) -> Iterable[Claim]:
        yield Live(SECOND, self.axis)

    def check(self, resolved: Resolved) -> None:
        stored, second = resolved.location("param").axes, resolved.location(SECOND).axes
        if self.axis not in stored:
            raise IllegalComposition(
                f"a second shard is to be kept over axis {self.axis!r}, and no parameters are split over it: add "
                f"zero(stage=3, axis={self.axis!r})"
            )
        if second == stored:
            raise IllegalComposition(
                f"a second shard over {axes_named(sorted(second))} would equal the stored one: parameters are split over no "
                "other axis. Add zero(stage=3) over the axis between nodes, or drop hierarchical"
            )


def hierarchical(axis: str = "local") -> Hierarchical:
    """Keep a second shard of the parameters, split over ``axis`` only, from a micro-batch's forward to its backward.

    For parameters that are split over the axis between nodes and over ``axis`` inside a node: ``chain(zero(3, axis="node"),
    zero(3, axis="local"), hierarchical("local"))``. Forward gathers across nodes first and keeps the result, and backward
    gathers inside the node only. Until then a rank holds all parameters divided by the size of ``axis`` in addition.

    Raises:
        IllegalComposition: an axis that is no name; when a plan is made, parameters that are not split over ``axis``, or only
            over ``axis``.

    >>> two = sl.chain(sl.zero(3, axis="node"), sl.zero(3, axis="local"), sl.hierarchical("local"))
    >>> sl.make_plan({"w": torch.ones(8, 8)}, sl.abstract_mesh(node=2, local=4), two).payload()
    {'node': 64, 'local': 576}
    """
    return Hierarchical(axis_of("hierarchical", "axis", axis))
