"""Gradients as low-rank factors, with error feedback (PowerSGD, arXiv 1905.13727)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shardlib.collectives.codecs.low_rank import LowRank
from shardlib.plan.arguments import axis_of, integer
from shardlib.plan.claims import Claim, LeafInfo, Reduce
from shardlib.plan.code import CodeCall, CodedTransform
from shardlib.plan.conditions import require_summed, require_whole_leaves
from shardlib.plan.transform import Resolved


@dataclass(frozen=True, repr=False)
class PowerSGD(CodedTransform):
    """The transform that `powersgd` makes, with the arguments given there."""

    axis: str
    codec: LowRank

    @property
    def call(self) -> CodeCall:
        return CodeCall(powersgd, {"axis": self.axis, "rank": self.codec.rank})

    def claims(self, sizes: Mapping[str, int], leaves: Sequence[LeafInfo]) -> Iterable[Claim]:
        yield Reduce(self.axis, codec=self.codec)

    def check(self, resolved: Resolved) -> None:
        require_whole_leaves(resolved, self.axis, self.codec)
        require_summed(resolved, self.axis, self.codec)


def powersgd(rank: int = 4, axis: str = "data") -> PowerSGD:
    """Sum gradients over ``axis`` as products of two factors, at ZeRO stage 0.

    A leaf of two or more dimensions is treated as a matrix ``[n, m]`` of its first dimension and all others, for which
    (n + m)·rank numbers are sent instead of n·m. Other leaves, and matrices for which that saves nothing, are sent
    uncompressed. What compression leaves out is added to the next step's gradients: residuals in fp32, of the size of the
    whole gradient, in ``TrainState.comm``, together with the factors ``[m, rank]`` that the next step starts from.

    Args:
        rank: rank of the factors, at least 1; the paper uses 1 to 4.
        axis: mesh axis over which gradients are summed.

    Raises:
        IllegalComposition: ``rank`` is not an integer of at least 1; when a plan is made, gradients that are not summed
            over ``axis``, or a state that is split over any axis.

    >>> parallel = sl.chain(sl.zero(0), sl.powersgd(rank=2))
    >>> sl.make_plan({"w": torch.ones(256, 256)}, sl.abstract_mesh(data=4), parallel).payload()
    {'data': 6144}
    """
    rank = integer("powersgd", "rank", rank, remedy="use the number of columns of the factors, {} or more")
    return PowerSGD(axis_of("powersgd", "axis", axis), LowRank(rank))
