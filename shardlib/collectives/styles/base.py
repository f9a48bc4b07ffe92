"""What every style is: how a parameter that is sliced over a mesh axis is cut, and consumed by the layer it belongs to."""

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
    """How the slices of one layer's leaves work together (Megatron-LM, arXiv 1909.08053): subclass it for one of your own.

    A style is a frozen value, equal to another of the same class, options and axis; the rules of `shardlib.tensor_slicing`
    take it as it is. Give ``name`` and ``spec``, and what a model consumes the leaf by: ``linear`` for ``F.linear``,
    ``x @ weight`` and ``torch.addmm``, ``embedding`` for ``F.embedding`` and ``sl.nn.embedding``, ``cross_entropy`` for
    ``sl.nn.linear_cross_entropy``. Each works with this rank's `Slice`, between the pairs that this offers. What is not
    given is refused where a model asks for it, and so is any other function of a slice.

    Attributes:
        axis: what the leaves are sliced over; `tensor_slicing` fills it in.
        name: what it is called in a plan's print-out and in messages.
        sums: every rank holds all of the leaf, any function may use it, on slices of activations, and its gradient is summed
            over the axis.
        gathered: what of a layer every rank gets whole, "{paths}" standing for its leaves: a line of the plan's log.
    """

    axis: str = field(default="", kw_only=True)

    name: ClassVar[str]
    sums: ClassVar[bool] = False

    def __str__(self) -> str:
        return self.name

    @property
    def rule(self) -> str:
        """How a rule gives it, for messages."""
        return f"{type(self).__name__}({self.options})"

    @property
    def options(self) -> str:
        """The options that differ from their defaults, as they are passed."""
        given = {option.name: (getattr(self, option.name), option.default) for option in fields(self)}
        return ", ".join(
            f"{name}={value!r}" for name, (value, usual) in given.items() if name != "axis" and value != usual
        )

    @property
    def gathered(self) -> str:
        return ""

    @abstractmethod
    def spec(self, shape: tuple[int, ...], ways: int) -> P | None:
        """How a leaf of the layer (its weight, or its bias of one dimension) is cut ``ways`` ways over the axis.

        None leaves it whole, its gradient the same on every rank.
        """

    def misfit(self, shape: tuple[int, ...], ways: int) -> tuple[str, str] | None:
        """What is wrong with slicing a leaf of this shape, and what to put in the rule's place ("": leave the leaf whole).

        That its ``spec`` divides is checked besides.
        """
        if len(shape) > 2:
            return f"{self.rule} is for a layer's weight, of 2 dimensions, and its bias", ""
        return None

    def linear(
        self, weight: Slice, x: torch.Tensor, bias: torch.Tensor | None, compute: Compute, transposed: bool
    ) -> torch.Tensor:
        """A layer's outputs.

        Args:
            weight: this rank's slice.
            x: the layer's input.
            bias: what is here of the bias, or None.
            compute: the layer's own function.
            transposed: it takes the weight as (in, out).
        """
        raise HandleError(f"{weight.path} is a layer's weight and has the style {self}; give its layer another style")

    def embedding(self, weight: Slice, ids: torch.Tensor, padding: int | None, sparse: bool) -> torch.Tensor:
        """The rows of ``ids``; row ``padding`` gets no gradient, and with ``sparse`` the gradient is a sparse tensor."""
        raise HandleError(f"{weight.path} is looked up and has the style {self}; give its layer the style 'vocab'")

    def cross_entropy(self, weight: Slice, x: torch.Tensor, *, ignore_index: int, label_smoothing: float) -> Losses:
        """Losses of an output layer whose input is ``x``, equal on all ranks of the axis."""
        raise HandleError(f"{weight.path} is an output layer with the style {self}; give it the style 'vocab'")
