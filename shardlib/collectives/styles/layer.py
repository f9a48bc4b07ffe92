"""The base of `Column` and `Row`, the two styles of a linear layer."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from shardlib.collectives.styles.base import Compute, Style
from shardlib.collectives.styles.slices import Slice
from shardlib.errors import HandleError


@dataclass(frozen=True)
class LayerStyle(Style):
    """A style that cuts a linear layer's weight along its inputs or its outputs.

    Attributes:
        heads: the number of heads that the inputs or outputs consist of, none of which may be cut; 0 for any cut.
        transposed: whether the weight is stored (in, out), for ``x @ weight``, not (out, in) as for ``F.linear``.
        experts: whether the leaf has the layer of an expert at each index of dimension 0. Every expert is cut.
        cut: which are split over the ranks, "inputs" or "outputs".
        whole: whether the inputs arrive whole, or the outputs are returned whole.
    """

    heads: int = 0
    transposed: bool = False
    experts: bool = False

    cut: ClassVar[str]

    @property
    @abstractmethod
    def whole(self) -> bool: ...

    @abstractmethod
    def dim_of_layer(self, shape: tuple[int, ...]) -> int:
        """The dimension along which a leaf of one layer is cut."""

    @abstractmethod
    def outputs(self, weight: Slice, x: torch.Tensor, bias: torch.Tensor | None, compute: Compute) -> torch.Tensor:
        """The layer's outputs, ``compute`` being its function of a weight in this style's order."""

    def dim(self, shape: tuple[int, ...]) -> int:
        """The dimension along which a leaf of this shape is cut."""
        first = int(self.experts)
        return first + self.dim_of_layer(shape[first:])

    def __str__(self) -> str:
        return self.name + "ᵀ" * self.transposed + " of experts" * self.experts + " (whole)" * self.whole

    @property
    def rule(self) -> str:
        return f"sl.{self.name}({self.options})"

    def misfit(self, shape: tuple[int, ...], ways: int) -> tuple[str, str] | None:
        if self.experts and len(shape) < 2:
            return "experts=True is for leaves with a dimension of experts and then a layer's", ""
        if wrong := super().misfit(shape[int(self.experts) :], ways):
            remedy = f"replace it with sl.{self.name}(experts=True) where dimension 0 counts experts"
            return wrong[0], remedy if len(shape) == 3 else wrong[1]
        size = shape[self.dim(shape)]
        if self.heads and size % self.heads:
            return f"{size} {self.cut} are not {self.heads} heads of one size", ""
        if self.heads % ways:
            return f"{self.heads} heads do not divide over {self.axis}={ways}", (
                f"use a size that divides {self.heads}, or put 'replicated' in place of all rules of this attention"
            )
        return None

    def linear(
        self, weight: Slice, x: torch.Tensor, bias: torch.Tensor | None, compute: Compute, transposed: bool
    ) -> torch.Tensor:
        self._check_order(weight, transposed)
        self._check_experts(weight, False)
        return self.outputs(weight, x, bias, compute)

    def grouped(self, weight: Slice, rows: torch.Tensor, bias: torch.Tensor | None, compute: Compute) -> torch.Tensor:
        self._check_order(weight, False)
        self._check_experts(weight, True)
        return self.outputs(weight, rows, bias, compute)

    def _check_experts(self, weight: Slice, experts: bool) -> None:
        """Raise `HandleError` where the layer is one of experts and this style is not, or the reverse."""
        if self.experts != experts:
            taken, cut = ("(experts, out, in)", "one layer's") if experts else ("one layer's", "that of experts")
            raise HandleError(
                f"{weight.path} is consumed as {taken} weight and sliced as {cut}; give its layer sl.{self.name}("
                f"experts={experts}) in tensor_slicing's rules"
            )

    def _check_order(self, weight: Slice, transposed: bool) -> None:
        """Raise `HandleError` where the layer takes the weight in another order than ``transposed`` of this style."""
        if self.transposed != transposed:
            order = "(in, out)" if transposed else "(out, in)"
            raise HandleError(
                f"{weight.path} is consumed as {order} and sliced as the other order; give its layer sl.{self.name}("
                f"transposed={transposed}) in tensor_slicing's rules"
            )
