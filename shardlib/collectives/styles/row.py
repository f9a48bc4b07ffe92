"""Styles of linear layers: sliced by rows or by columns, and what is held whole by all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from shardlib.collectives.styles.base import Compute, Style
from shardlib.collectives.styles.layer import LayerStyle
from shardlib.collectives.styles.slices import Slice
from shardlib.errors import HandleError
from shardlib.mesh.specs import P

# Linear layers whose inputs are split over the ranks.


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
                f"{weight.path} has the style row and takes {inputs} inputs on this rank, but gets {x.shape[-1]}: its input "
                "must come from column-sliced layers; use sl.row(split=True) where it comes whole"
            )
        y = weight.leave(compute(x, weight.local, None))
        # The bias is whole, and added once, after the sum.
        return y if bias is None else y + bias


# Linear layers whose outputs are split over the ranks.


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
                f"{weight.path} has the style column and {held} outputs on this rank, but gets a bias of {bias.shape[-1]}; "
                f"give both the same rule{rule}"
            )
        y = compute(weight.enter(x), weight.local, bias)
        return weight.whole_outputs(y, outputs) if self.gather else weight.share(y, outputs)


# Leaves that are whole on every rank and used on slices of activations.


@dataclass(frozen=True)
class Shared(Style):
    """A style in which each rank holds the whole leaf and uses it on its slices of activations, so that the leaf's gradient
    is a partial sum over the axis."""

    name: ClassVar[str] = "shared"
    sums: ClassVar[bool] = True

    @property
    def rule(self) -> str:
        return repr(self.name)

    def spec(self, shape: tuple[int, ...], ways: int) -> P:
        return P()

    def linear(
        self, weight: Slice, x: torch.Tensor, bias: torch.Tensor | None, compute: Compute, transposed: bool
    ) -> torch.Tensor:
        return compute(x, weight.local, bias)

    def grouped(self, weight: Slice, rows: torch.Tensor, bias: torch.Tensor | None, compute: Compute) -> torch.Tensor:
        return compute(rows, weight.local, bias)
