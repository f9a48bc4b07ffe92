"""The entry of a carry into a stage's graph."""

from __future__ import annotations

from typing import Any

import torch

from shardlib.tree import Tree, tree_map


class _CarryEntry(torch.autograd.Function):
    """The values of a carry, whose gradient goes to a leaf without memory."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return values.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def entered(carry: Tree) -> tuple[Tree, list[torch.Tensor]]:
    """A carry for the stage's function, and the leaves of its graph that stand for the tensors that require gradients.

    The leaves have no memory, so that the carry itself is kept by those alone who need it for backward: a store of blocks'
    inputs may take it elsewhere.
    """
    leaves: list[torch.Tensor] = []

    def enter(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.requires_grad:
            return value
        leaves.append(value.new_zeros(()).expand(value.shape).requires_grad_())
        return _CarryEntry.apply(leaves[-1], value.detach())

    return tree_map(enter, carry), leaves
