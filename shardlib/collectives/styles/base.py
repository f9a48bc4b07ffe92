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
        raise HandleError(f"{weight.path} is a layer's weight and has the style {self}; give its layer another style")

    def grouped(self, weight: Slice, rows: torch.Tensor, bias: torch.Tensor | None, compute: Compute) -> torch.Tensor:
        """The outputs of a layer of experts, whose weight is (experts, out, in).

        Args:
            rows: ``[R, in]``, each of one expert.
            bias: ``[R, out]``: this rank's slice of each row's bias (the whole bias where ``spec`` leaves it whole), or None.
        """
        raise HandleError(
            f"{weight.path} is a weight of experts and has the style {self}; give its layer another style"
        )

    def embedding(self, weight: Slice, ids: torch.Tensor, padding: int | None, sparse: bool) -> torch.Tensor:
        """The rows of ``ids``; row ``padding`` gets no gradient, and with ``sparse`` the gradient is a sparse tensor."""
        raise HandleError(f"{weight.path} is looked up and has the style {self}; give its layer the style 'vocab'")

    def cross_entropy(self, weight: Slice, x: torch.Tensor, *, ignore_index: int, label_smoothing: float) -> Losses:
        """The losses of an output layer with input ``x``, as a function of the targets; equal on all ranks of the axis."""
        raise HandleError(f"{weight.path} is an output layer with the style {self}; give it the style 'vocab'")
