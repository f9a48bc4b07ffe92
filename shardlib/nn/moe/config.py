"""`MoEConfig`: what a layer of experts is made of, apart from its parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from shardlib.kernels.gelu import gelu
from shardlib.kernels.swiglu import swiglu
from shardlib.nn.moe.noise import Tokens
from shardlib.nn.moe.routing import Routing
from shardlib.rng import Key

# ``product(rows, weight, bias=None)``: as F.linear, each row with the matrix of its own expert.
Product = Callable[..., torch.Tensor]
# ``expert(params, rows, product)``: the outputs for rows of inputs.
Expert = Callable[[Mapping[str, Any], torch.Tensor, Product], torch.Tensor]
# ``router(logits, rng, balance)``.
Route = Callable[[torch.Tensor, Key | Tokens | None, torch.Tensor | None], Routing]


def _swiglu(params: Mapping[str, Any], rows: torch.Tensor, product: Product) -> torch.Tensor:
    return product(swiglu(product(rows, params["gate"]), product(rows, params["up"])), params["down"])


def _gelu(params: Mapping[str, Any], rows: torch.Tensor, product: Product) -> torch.Tensor:
    return product(gelu(product(rows, params["up"], params.get("up_bias"))), params["down"], params.get("down_bias"))


def _relu(params: Mapping[str, Any], rows: torch.Tensor, product: Product) -> torch.Tensor:
    return product(F.relu(product(rows, params["up"], params.get("up_bias"))), params["down"], params.get("down_bias"))


EXPERTS: dict[str, Expert] = {"swiglu": _swiglu, "gelu": _gelu, "relu": _relu}


@dataclass(frozen=True)
class MoEConfig:
    """What `moe` is made of, apart from its parameters.

    Attributes:
        router: of `shardlib.nn.routers`, or a function ``(logits, rng, balance) -> Routing``.
        expert: "swiglu" (parameters "gate", "up", "down"), "gelu" or "relu" ("up", "down", and where there are any
            "up_bias", "down_bias"); or a function ``expert(params, rows, product)`` of the layer's ``params["experts"]`` and
            of rows ``[R, W]``, each a token of some expert. ``product(rows, weight, bias=None)`` is ``F.linear`` with the
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
        return EXPERTS[self.expert] if isinstance(self.expert, str) else self.expert
