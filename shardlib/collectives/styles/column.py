"""Linear layers whose outputs are split over the ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from shardlib.collectives.styles.base import Compute, LayerStyle
from shardlib.collectives.styles.slices import Slice
from shardlib.errors import HandleError
from shardlib.mesh.specs import P


@dataclass(frozen=True)
class Column(LayerStyle):
    """A style in which each rank computes its share of the outputs from the whole input. The bias is cut like the outputs.

    Attributes:
        gather: whether every rank gets all outputs. Their number need not divide then: rows of zeros pad the last slices.
    """

    gather: bool = False

    name: ClassVar[str] = "column"
    cut: ClassVar[str] = "outputs"

    @property
    def whole(self) -> bool:
        return self.gather

    @property
    def gathered(self) -> str:
        return "the outputs of {paths}" if self.gather else ""

    def dim_of_layer(self, shape: tuple[int, ...]) -> int:
        return 1 if self.transposed and len(shape) > 1 else 0

    def spec(self, shape: tuple[int, ...], ways: int) -> P:
        dim = self.dim(shape)
        # The model never sees one rank's share of the outputs where all are gathered.
        pads = self.gather and not self.heads and dim == 0 and shape != ()
        return P(*([None] * dim), self.axis, padded=pads and shape[0] % ways > 0)

    def misfit(self, shape: tuple[int, ...], ways: int) -> tuple[str, str] | None:
        # A weight (out, in, ...) is cut along its first dimension, whatever dimensions follow.
        return super().misfit(shape if self.transposed else shape[: 2 + self.experts], ways)

    def outputs(self, weight: Slice, x: torch.Tensor, bias: torch.Tensor | None, compute: Compute) -> torch.Tensor:
        outputs, held = (shape[self.dim(shape)] for shape in (weight.window.shape, weight.local.shape))
        if bias is not None and bias.dim() and bias.shape[-1] not in (1, held):
            layer = weight.path.rpartition("/")[0]
            rule = f": a rule for {layer!r} is one" if layer else ""
            raise HandleError(
                f"{weight.path} has the style column, {held} outputs on this rank and a bias of {bias.shape[-1]}; "
                f"give both the same rule{rule}"
            )
        y = compute(weight.enter(x), weight.local, bias)
        return weight.whole_outputs(y, outputs) if self.gather else weight.share(y, outputs)
