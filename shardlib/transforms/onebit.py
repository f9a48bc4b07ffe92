"""Gradients in one bit per element, with error feedback (the two-phase all-reduce of arXiv 2102.02888)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shardlib.collectives.codecs.integers import OneBit, check_scales
from shardlib.plan.claims import Claim, LeafInfo, Reduce
from shardlib.plan.conditions import require_no_float64, require_summed
from shardlib.plan.resolved import Resolved
from shardlib.plan.transform import Transform


@dataclass(frozen=True)
class OneBitGradients(Transform):
    axis: str
    codec: OneBit

    @property
    def name(self) -> str:
        return f"onebit(axis={self.axis!r}, scales={self.codec.scales!r})"

    def claims(self, sizes: Mapping[str, int], leaves: Sequence[LeafInfo]) -> Iterable[Claim]:
        yield Reduce(self.axis, codec=self.codec)

    def check(self, resolved: Resolved) -> None:
        require_summed(resolved, self.axis, self.codec)
        require_no_float64(resolved, self.codec)


def onebit(axis: str = "data", scales: str | int = "leaf", *, feedback: bool = True) -> OneBitGradients:
    """Reduce gradients over ``axis`` in one bit per element, at any ZeRO stage.

    Where gradients are split over the axis (stages 1 to 3) each rank's signs and scales go to the owner, who adds them up
    in full precision; where they are not, the sum is compressed once more and gathered. What is left out is added to the
    next step's gradients: fp32 errors, the size of the whole gradient, in ``TrainState.comm`` (and as much again during a
    step, so that one that does not count leaves them alone). Adam's variance suffers from such gradients
    (less with blocks of 128); `shardlib.optim.axis_owner.onebit_adam` freezes it.

    Args:
        scales: "leaf" for one scale per parameter and rank, or elements per block, a multiple of 8.
        feedback: False to forget what is left out; for comparison.

    Raises:
        IllegalComposition: ``scales`` is neither.

    >>> mesh, params = sl.abstract_mesh(data=4), {"w": torch.ones(256, 256)}
    >>> sl.make_plan(params, mesh, sl.zero(2)).payload()
    {'data': 393216}
    >>> sl.make_plan(params, mesh, sl.chain(sl.zero(2), sl.onebit())).payload()
    {'data': 202764}
    """
    check_scales(scales, "onebit")
    return OneBitGradients(axis, OneBit(scales, feedback))
