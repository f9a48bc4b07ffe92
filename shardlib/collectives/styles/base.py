"""The base of styles. A style says how a parameter is cut over a mesh axis, and how its layer computes with the slices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import ClassVar

import torch

from shardlib.collectives.styles.slices import Slice
from shardlib.errors import HandleError
from shardlib.mesh.specs import P

# ``compute(x, weight, bias)``: a layer's outputs; the bias may be None.
Compute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
# ``losses(targets, reduction)``: cross entropy, see `shardlib.nn.linear_cross_entropy`.
Losses = Callable[[torch.Tensor, str], torch.Tensor]


@dataclass(frozen=True)
class Style(ABC):
    """The way in which the slices of a layer's leaves work together (Megatron-LM, arXiv 1909.08053). A new style is a
    subclass.

    A style is a frozen value, equal to another of the same class, options and axis. The rules of `shardlib.tensor_slicing`
    take styles. A subclass gives ``name`` and ``spec``, and one method for each way in which models use such leaves:
    ``linear`` for ``F.linear``, ``x @ weight`` and ``torch.addmm``, ``grouped`` for products of experts (``sl.nn.moe``),
    ``embedding`` for ``F.embedding`` and ``sl.nn.embedding``, ``cross_entropy`` for ``sl.nn.linear_cross_entropy``. Each
    method computes with this rank's `Slice`, and exchanges activations by the slice's methods. Uses without a method, and all
    other functions of a slice, are refused.

    Attributes:
        axis: the mesh axis that the leaves are sliced over; `tensor_slicing` sets it.
        name: the style's name in a plan's print-out and in messages.
        sums: whether every rank holds the whole leaf, for any function to use on slices of activations, with a gradient that
            is summed over the axis.
        experts: whether leaves hold the layers of experts along dimension 0, whose rows ``grouped`` computes.
        gathered: the activations that every rank gets whole, for the plan's log; "{paths}" stands for the layer's leaves.
    """

    axis: str = field(default="", kw_only=True)

    name: ClassVar[str]
    sums: ClassVar[bool] = False

    def __str__(self) -> str:
        return self.name

    @property
    def rule(self) -> str:
        """The style as it is written in a rule, for messages."""
        return f"{type(self).__name__}({self.options})"

    @property
    def options(self) -> str:
        """The options that differ from their defaults, as they are written in a call."""
        given = {option.name: (getattr(self, option.name), option.default) for option in fields(self)}
        return ", ".join(
            f"{name}={value!r}" for name, (value, usual) in given.items() if name != "axis" and value != usual
        )

    @property
    def experts(self) -> bool:
        return False

    @property
    def gathered(self) -> str:
        return ""

    @abstractmethod
    def spec(self, shape: tuple[int, ...], ways: int) -> P | None:
        """The spec of a leaf of the layer (its weight, or its bias of one dimension) over an axis of size ``ways``.

        None leaves the leaf whole, with the same gradient on every rank.
        """

    def misfit(self, shape: tuple[int, ...], ways: int) -> tuple[str, str] | None:
        """Why a leaf of this shape cannot be sliced, and what to put in the rule's place ("" for leaving the leaf whole).

        Sizes that ``spec`` does not divide are refused without this method.
        """
        if len(shape) > 2:
            return f"{self.rule} is for a layer's weight, of 2 dimensions, and its bias", ""
        return None

    def linear(
        self, weight: Slice, x: torch.Tensor, bias: torch.Tensor | None, compute: Compute, transposed: bool
    ) -> torch.Tensor:
        """A layer's outputs.

        Args:
            weight: this rank's slice of the weight.
            x: the layer's input.
            bias: this rank's slice of the bias (the whole bias where ``spec`` leaves it whole), or None.
            compute: the layer's function.
            transposed: whether ``compute`` takes the weight as (in, out).
        """
        raise HandleError(f"{weight.path} is a layer's weight and has the style {self}; give it another one")

    def grouped(self, weight: Slice, rows: torch.Tensor, bias: torch.Tensor | None, compute: Compute) -> torch.Tensor:
        """The outputs of a layer of experts, whose weight is (experts, out, in).

        Args:
            rows: ``[R, in]``, each of one expert.
            bias: ``[R, out]``: this rank's slice of each row's bias (the whole bias where ``spec`` leaves it whole), or None.
        """
        raise HandleError(f"{weight.path} is a weight of experts and has the style {self}; give it another one")

    def embedding(self, weight: Slice, ids: torch.Tensor, padding: int | None, sparse: bool) -> torch.Tensor:
        """The rows of ``ids``; row ``padding`` gets no gradient, and with ``sparse`` the gradient is a sparse tensor."""
        raise HandleError(f"{weight.path} is looked up and has the style {self}; give it the style 'vocab'")

    def cross_entropy(self, weight: Slice, x: torch.Tensor, *, ignore_index: int, label_smoothing: float) -> Losses:
        """The losses of an output layer with input ``x``, as a function of the targets; equal on all ranks of the axis."""
        raise HandleError(f"{weight.path} is an output layer with the style {self}; give it the style 'vocab'")


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
                f"{weight.path} is used as {taken} weight and sliced as {cut}; give its layer the rule "
                f"sl.{self.name}(experts={experts})"
            )

    def _check_order(self, weight: Slice, transposed: bool) -> None:
        """Raise `HandleError` where the layer takes the weight in another order than ``transposed`` of this style."""
        if self.transposed != transposed:
            order = "(in, out)" if transposed else "(out, in)"
            raise HandleError(
                f"{weight.path} is used as {order} and sliced in the other order; give its layer the rule "
                f"sl.{self.name}(transposed={transposed})"
            )
