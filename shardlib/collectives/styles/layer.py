"""The base of `Column` and `Row`, the two styles of a linear layer."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from shardlib.collectives.styles.base import Style
from shardlib.collectives.styles.slices import Slice
from shardlib.errors import HandleError


@dataclass(frozen=True)
class LayerStyle(Style):
    """A style that cuts a linear layer's weight along its inputs or its outputs.

    Attributes:
        heads: the number of heads that the inputs or outputs consist of, none of which may be cut; 0 for any cut.
        transposed: whether the weight is stored (in, out), for ``x @ weight``, not (out, in) as for ``F.linear``.
        cut: which are split over the ranks, "inputs" or "outputs".
        whole: whether the inputs arrive whole, or the outputs are returned whole.
    """

    heads: int = 0
    transposed: bool = False

    cut: ClassVar[str]

    @property
    @abstractmethod
    def whole(self) -> bool: ...

    @abstractmethod
    def dim(self, shape: tuple[int, ...]) -> int:
        """The dimension along which a leaf of this shape is cut."""

    def __str__(self) -> str:
        return self.name + "ᵀ" * self.transposed + " (whole)" * self.whole

    @property
    def rule(self) -> str:
        return f"sl.{self.name}({self.options})"

    def misfit(self, shape: tuple[int, ...], ways: int) -> tuple[str, str] | None:
        if wrong := super().misfit(shape, ways):
            return wrong
        size = shape[self.dim(shape)]
        if self.heads and size % self.heads:
            return f"{size} {self.cut} are not {self.heads} heads of one size", ""
        if self.heads % ways:
            return f"{self.heads} heads do not divide over {self.axis}={ways}", (
                f"use a size that divides {self.heads}, or put 'replicated' in place of all rules of this attention"
            )
        return None

    def check_order(self, weight: Slice, transposed: bool) -> None:
        """Raise `HandleError` where the layer takes the weight in another order than ``transposed`` of this style."""
        if self.transposed != transposed:
            order = "(in, out)" if transposed else "(out, in)"
            raise HandleError(
                f"{weight.path} is consumed as {order} and sliced as the other order; give its layer sl.{self.name}("
                f"transposed={transposed}) in tensor_slicing's rules"
            )
