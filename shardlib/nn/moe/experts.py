"""`run_experts`: from tokens to the rows of their experts, through the experts, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shardlib.kernels.permute import permute, unpermute
from shardlib.nn.moe.compute import Rows
from shardlib.nn.moe.config import Expert
from shardlib.nn.moe.routing import Routing


def run_experts(params: Mapping[str, Any], x: torch.Tensor, routing: Routing, expert: Expert) -> torch.Tensor:
    """The experts' outputs, weighted and summed: ``y_t = Σ_j w_tj · expert_e(x_t)``, e the token's j-th choice.

    The part of `moe` below the router, for layers with a router of their own (`Routing.of` makes a routing of choices).

    Args:
        params: what ``expert`` takes, each leaf with the experts along dimension 0.
        x: ``[T, W]``.
        routing: of T tokens, among all experts.
        expert: ``expert(params, rows, product)``, as in `shardlib.nn.MoEConfig`.

    Returns:
        ``[T, W']``, W' the width of the experts' outputs.

    >>> routing = sl.nn.routers.Routing.of(torch.tensor([[1], [0]]), torch.tensor([[1.0], [0.5]]), 2)
    >>> double = lambda params, rows, product: 2 * product(rows, params["w"])
    >>> sl.nn.run_experts({"w": torch.tensor([[[1.0]], [[10.0]]])}, torch.tensor([[1.0], [2.0]]), routing, double).tolist()
    [[20.0], [2.0]]
    """
    rows = Rows.of(routing)
    inputs = permute(x, rows.positions, len(rows.experts))
    return unpermute(expert(params, inputs, rows.product), rows.positions, routing.weights)
