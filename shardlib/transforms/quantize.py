"""Gathers and reductions in few bits (ZeRO++, arXiv 2306.10209)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shardlib.collectives.codecs import FORMS, FewBits, named
from shardlib.errors import IllegalComposition
from shardlib.kernels.quantize import Blockwise
from shardlib.plan.arguments import axis_of, choice, flag, integer
from shardlib.plan.claims import Claim, LeafInfo, Reduce
from shardlib.plan.code import CodeCall, CodedTransform
from shardlib.plan.conditions import require_no_float64, require_split_parameters, require_summed
from shardlib.plan.transform import Resolved


@dataclass(frozen=True, repr=False)
class Quantize(CodedTransform):
    """The transform that `quantize` makes, with the arguments given there."""

    weights: str | None
    gradients: str | None
    axis: str
    block: int
    feedback: bool

    @property
    def call(self) -> CodeCall:
        return CodeCall(quantize, vars(self))

    def claims(self, sizes: Mapping[str, int], leaves: Sequence[LeafInfo]) -> Iterable[Claim]:
        yield Reduce(self.axis, codec=self._codec, gathered=self._packing)

    def check(self, resolved: Resolved) -> None:
        if self._codec is not None:
            require_summed(resolved, self.axis, self._codec)
            require_no_float64(resolved, self._codec, "sl.onebit()")
        if self._packing is not None:
            require_split_parameters(resolved, self.axis, self._packing)
            require_no_float64(resolved, self._packing, "leave weights= out")

    @property
    def _codec(self) -> FewBits | None:
        """The codec of gradients."""
        return named(self.gradients, self.block, self.feedback) if self.gradients else None

    @property
    def _packing(self) -> FewBits | None:
        """The codec of gathered parameters."""
        return named(self.weights, self.block, False) if self.weights else None


def quantize(
    weights: str | None = None,
    gradients: str | None = None,
    axis: str = "data",
    *,
    block: int = 128,
    feedback: bool = True,
) -> Quantize:
    """Send parameters and gradients over ``axis`` as integers or 8-bit floats, with an fp32 scale per block.

    ``weights`` quantises gathers of parameters that are split over the axis (ZeRO stage 3): all ranks, the owner included,
    compute with the quantised values; the stored parameters stay exact. ``gradients`` quantises reductions at any stage:
    split gradients are summed in fp32 by their owner (over two axes they are quantised again before the second sum: two
    hops); whole gradients are summed, quantised again and gathered. What quantisation leaves out of gradients is added to
    the next step's gradients: residuals in fp32, in ``TrainState.comm``.

    Args:
        weights: "int8", "int4" or "fp8" (e4m3, by plain PyTorch operations; fast on GPUs that support it), or None.
        gradients: as for ``weights``.
        axis: mesh axis whose messages are quantised.
        block: elements per scale, a power of two from 16 to 4096.
        feedback: False drops what quantisation leaves out of gradients, as ZeRO++ does; saves the residuals' memory.

    Raises:
        IllegalComposition: neither ``weights`` nor ``gradients`` is given, or an argument is out of range; when a plan is
            made, gradients that are not summed over ``axis``, parameters that are not split over it, or parameters in
            float64.

    >>> parallel = sl.chain(sl.zero(2), sl.quantize(gradients="int8"))
    >>> sl.make_plan({"w": torch.ones(256, 256)}, sl.abstract_mesh(data=4), parallel).payload()
    {'data': 247296}
    """
    if weights is None and gradients is None:
        raise IllegalComposition("quantize() has nothing to quantise: give weights='int8', gradients='int4', or both")
    weights, gradients = (
        choice("quantize", name, form, (None, *FORMS))
        for name, form in {"weights": weights, "gradients": gradients}.items()
    )
    block = integer("quantize", "block", block, 16, "use a power of two from 16 to 4096")
    try:
        Blockwise(8, block)
    except ValueError as error:
        raise IllegalComposition(f"quantize(block={block!r}): {error}") from error
    return Quantize(
        weights, gradients, axis_of("quantize", "axis", axis), block, flag("quantize", "feedback", feedback)
    )
