"""Linear layers whose inputs are split over the ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from shardlib.collectives.styles.base import Compute, LayerStyle
from shardlib.collectives.styles.slices import Slice
from shardlib.errors import HandleError
from shardlib.mesh.specs import P


@dataclass(frozen=True)
class Row(LayerStyle):
    """A style in which each rank computes partial sums of all outputs from its share of the inputs, which are all-reduced.

    Attributes:
        split: whether the input arrives whole, so that each rank takes its share of it.
    """

    split: bool = False

    name: ClassVar[str] = "row"
    cut: ClassVar[str] = "inputs"

    @property
    def whole(self) -> bool:
        return self.split

    def dim_of_layer(self, shape: tuple[int, ...]) -> int:
        return 0 if self.transposed else 1

    def spec(self, shape: tuple[int, ...], ways: int) -> P | None:
        return None if len(shape) < 2 + self.experts else P(*([None] * self.dim(shape)), self.axis)

    def outputs(self, weight: Slice, x: torch.Tensor, bias: torch.Tensor | None, compute: Compute) -> torch.Tensor:
        if self.split:
            x = weight.input_share(x)
        inputs = weight.local.shape[self.dim(weight.local.shape)]
        if x.shape[-1] != inputs:
            raise HandleError(
                f"{weight.path} has the style row and {inputs} inputs on this rank, and got {x.shape[-1]}; use "
                "sl.row(split=True) for a whole input"
            )
        y = weight.leave(compute(x, weight.local, None))
        # The bias is whole, and added once, after the sum.
        return y if bias is None else y + bias
