"""Gradients in one bit per element, with error feedback (the two-phase all-reduce of arXiv 2102.02888)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shardlib.collectives.codecs.integers import OneBit, scales_of
from shardlib.plan.arguments import axis_of, flag
from shardlib.plan.claims import Claim, LeafInfo, Reduce
from shardlib.plan.code import CodeCall, CodedTransform
from shardlib.plan.conditions import require_summed
from shardlib.plan.transform import Resolved


@dataclass(frozen=True, repr=False)
class OneBitGradients(CodedTransform):
    """The transform that `onebit` makes, with the arguments given there."""

    axis: str
    codec: OneBit

    @property
    def call(self) -> CodeCall:
        return CodeCall(onebit, {"axis": self.axis, "scales": self.codec.scales, "feedback": self.codec.feedback})

    def claims(self, sizes: Mapping[str, int], leaves: Sequence[LeafInfo]) -> Iterable[Claim]:
        yield Reduce(self.axis, codec=self.codec)

    def check(self, resolved: Resolved) -> None:
        require_summed(resolved, self.axis, self.codec)


def onebit(axis: str = "data", scales: str | int = "leaf", *, feedback: bool = True) -> OneBitGradients:
    """Reduce gradients over ``axis`` in one bit per element, at any ZeRO stage.

    Where gradients are split over the axis (ZeRO stages 1 to 3) each rank sends signs and scales to the owner, which sums
    them in full precision; where gradients are whole, the sum is compressed once more and gathered. What compression leaves
    out is added to the next step's gradients: residuals in fp32, of the size of the whole gradient, in ``TrainState.comm``
    (and as much memory again during a step, so that a skipped step leaves the residuals unchanged). Adam's estimate of the
    variance suffers from such gradients (less with blocks of 128); `shardlib.optim.axis_owner.onebit_adam` freezes it.

    Args:
        axis: mesh axis over which gradients are summed.
        scales: "leaf" for one scale per parameter and rank, or elements per block, a multiple of 8.
        feedback: False drops what compression leaves out, without residuals; for comparison.

    Raises:
        IllegalComposition: ``scales`` is neither "leaf" nor a multiple of 8; when a plan is made, gradients that are not
            summed over ``axis``.

    >>> mesh, params = sl.abstract_mesh(data=4), {"w": torch.ones(256, 256)}
    >>> sl.make_plan(params, mesh, sl.zero(2)).payload()
    {'data': 393216}
    >>> sl.make_plan(params, mesh, sl.chain(sl.zero(2), sl.onebit())).payload()
    {'data': 202764}
    """
    scales = scales_of("onebit", scales)
    return OneBitGradients(axis_of("onebit", "axis", axis), OneBit(scales, flag("onebit", "feedback", feedback)))
