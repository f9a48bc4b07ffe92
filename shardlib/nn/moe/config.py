"""`MoEConfig`: what a layer of experts is made of, apart from its parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from shardlib.kernels.gelu import gelu
from shardlib.kernels.swiglu import swiglu
from shardlib.nn.moe.routing import Routing

# ``product(rows, weight, bias=None)``: as F.linear, each row with the matrix of its own expert.
Product = Callable[..., torch.Tensor]
# ``expert(params, rows, product)``: the outputs for rows of inputs.
Expert = Callable[[Mapping[str, Any], torch.Tensor, Product], torch.Tensor]
# ``router(logits, rng, balance)``, and ``mask=`` where there is padding.
Route = Callable[..., Routing]


def _swiglu(params: Mapping[str, Any], rows: torch.Tensor, product: Product) -> torch.Tensor:
    return product(swiglu(product(rows, params["gate"]), product(rows, params["up"])), params["down"])


def _plain(
    activation: Callable[[torch.Tensor], torch.Tensor], params: Mapping[str, Any], rows: torch.Tensor, product: Product
) -> torch.Tensor:
    hidden = activation(product(rows, params["up"], params.get("up_bias")))
    return product(hidden, params["down"], params.get("down_bias"))


class Named(NamedTuple):
    """An expert that has a name.

    Attributes:
        compute: its function.
        sizes: parameter -> "hidden" and "width" in the order of one expert's dimensions.
    """

    compute: Expert
    sizes: Mapping[str, tuple[str, ...]]


_GATED = {"gate": ("hidden", "width"), "up": ("hidden", "width"), "down": ("width", "hidden")}
_BIASED = {"up": ("hidden", "width"), "up_bias": ("hidden",), "down": ("width", "hidden"), "down_bias": ("width",)}
EXPERTS = {
    "swiglu": Named(_swiglu, _GATED),
    "gelu": Named(partial(_plain, gelu), _BIASED),
    "gelu_tanh": Named(partial(_plain, partial(gelu, approximate="tanh")), _BIASED),
    "relu": Named(partial(_plain, F.relu), _BIASED),
}


@dataclass(frozen=True)
class MoEConfig:
    """What `moe` is made of, apart from its parameters.

    Attributes:
        router: of `shardlib.nn.routers`, or a function ``(logits, rng, balance) -> Routing``, which takes a
            ``mask=`` too if layers have padding.
        expert: "swiglu" (parameters "gate", "up", "down"), "gelu", "gelu_tanh" or "relu" ("up", "down", and where there are
            any "up_bias", "down_bias"); or a function ``expert(params, rows, product)`` of the layer's ``params["experts"]``
            and of rows ``[R, W]``, each a token of some expert. ``product(rows, weight, bias=None)`` is ``F.linear`` with the
            weight ``[E, out, in]`` and bias ``[E, out]`` of each row's expert; nothing else may mix rows. Shared and residual
            experts are the same function of one expert's parameters.
        jitter: the router's input, and it alone, is multiplied by random numbers in ``[1 − jitter, 1 + jitter)`` in training
            (arXiv 2101.03961, section 2.2).

    Raises:
        ValueError: an unknown name of an expert, or a jitter outside [0, 1).

    >>> sl.nn.MoEConfig(sl.nn.routers.switch(), expert="gelu").jitter
    0.0
    """

    router: Route
    expert: str | Expert = "swiglu"
    jitter: float = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.expert, str) and self.expert not in EXPERTS:
            raise ValueError(f"MoEConfig(expert={self.expert!r}): use a function, or {', '.join(map(repr, EXPERTS))}")
        if not 0 <= self.jitter < 1:
            raise ValueError(f"MoEConfig(jitter={self.jitter!r}): a jitter is in [0, 1)")

    @property
    def compute(self) -> Expert:
        """The experts' function."""
        return EXPERTS[self.expert].compute if isinstance(self.expert, str) else self.expert

    @property
    def slices(self) -> dict[str, str]:
        """Parameter -> the style of `shardlib.tensor_slicing` that cuts an expert's inner width; none of a function's."""
        sizes = EXPERTS[self.expert].sizes if isinstance(self.expert, str) else {}
        return {name: "column" if order[0] == "hidden" else "row" for name, order in sizes.items()}

    def shapes(self, width: int, hidden: int) -> dict[str, tuple[int, ...]]:
        """Parameter -> shape, for one expert of these widths.

        Raises:
            ValueError: the expert is a function, whose parameters only its author knows.
        """
        if not isinstance(self.expert, str):
            raise ValueError(
                f"the expert is the function {getattr(self.expert, '__name__', self.expert)!r}, whose parameters are not "
                f"known: make them yourself, as moe takes them, or name one of {', '.join(map(repr, EXPERTS))}"
            )
        sizes = {"width": width, "hidden": hidden}
        return {name: tuple(sizes[size] for size in order) for name, order in EXPERTS[self.expert].sizes.items()}
