"""One algorithm as both a pure ``update`` and an ``apply`` in place.

The algorithm is a *step*, ``step(params, grads, state, scale, shards) -> (state, ParameterChange)``. It may use up
the memory of its gradients and state, and does not change parameters: the `ParameterChange` says how they change. ``update``
runs the step on copies. Both apply the same operations to each element, so both give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from shardlib.common.thresholds import chunks
from shardlib.optim.base import GradientTransformation, Owned, require_params, scaled, separate_copy, write_copies
from shardlib.optim.shards import Locality, Shards
from shardlib.tree import Tree, leaves_of, tree_map


@dataclass(frozen=True)
class ParameterChange:
    """The change of parameters in a step.

    Attributes:
        fn: ``fn(param, *tensors)``, elementwise: the change of a parameter, in memory that may be written to. May also write
            to ``tensors`` (of the state) in place.
        trees: the trees, like the parameters, whose tensors ``fn`` gets.
        factors: one factor of the change for each parameter, ``[leaf_count]``; None for 1.
        absolute: whether ``fn`` returns the new parameter instead of its change.
        in_place: ``in_place(param, *tensors, copy=copy)``: changes a parameter by what ``fn`` returns, to the last bit, and
            writes it to ``copy`` (in another dtype, or None) too. If given, only ``update`` uses ``fn``.
    """

    fn: Callable[..., torch.Tensor]
    trees: Sequence[Tree] = field(default=())
    factors: torch.Tensor | None = None
    absolute: bool = False
    in_place: Callable[..., None] | None = None

    def updates(self, params: Tree, shards: Shards) -> Tree:
        """The changes of ``params``, as a new tree."""
        changes = tree_map(self.fn, params, *self.trees)
        if self.absolute:
            return tree_map(torch.sub, changes, params)
        if self.factors is not None:
            for number, (change,) in shards.leaves(changes):
                change.mul_(self.factors[number])
        return changes

    def write(self, params: Tree, copies: Tree, shards: Shards) -> None:
        """Change ``params`` in place, and write them to ``copies``, which are as in `GradientTransformation.apply`."""
        if self.in_place is not None:
            for param, copy, *tensors in zip(*map(leaves_of, (params, copies, *self.trees)), strict=True):
                self.in_place(param, *tensors, copy=separate_copy(copy, param))
            return

        def replace(p: torch.Tensor, *tensors: torch.Tensor) -> None:
            p.copy_(self.fn(p, *tensors))

        def add(p: torch.Tensor, *tensors: torch.Tensor) -> None:
            p.add_(self.fn(p, *tensors))

        def add_leaf(factors: torch.Tensor, number: int, p: torch.Tensor, *tensors: torch.Tensor) -> None:
            p.add_(self.fn(p, *tensors).mul_(factors[number]))

        if self.factors is not None:
            each_leaf(shards, partial(add_leaf, self.factors), params, *self.trees)
        else:
            each(replace if self.absolute else add, params, *self.trees)
        write_copies(copies, params)


Step = Callable[[Tree, Tree, Any, torch.Tensor | None, Shards], tuple[Any, ParameterChange]]


def stepping(
    name: str,
    init: Callable[..., Tree],
    step: Step,
    locality: Locality,
    owns: Owned | None = None,
    sends: Callable[[Shards], Mapping[str, int]] | None = None,
    last: str | None = None,
) -> GradientTransformation:
    """The gradient transformation that runs ``step``. Other arguments are as in `GradientTransformation`."""

    def update(updates: Tree, state: Tree, params: Tree, *, shards: Shards) -> tuple[Tree, Tree]:
        require_params(name, params)
        grads = tree_map(lambda g, p: g.to(p.dtype, copy=True), updates, params)
        state, move = step(params, grads, tree_map(torch.clone, state), None, shards)
        return move.updates(params, shards), state

    def apply(
        params: Tree, updates: Tree, state: Tree, scale: torch.Tensor | None, shards: Shards, copies: Tree
    ) -> Tree:
        if scale is not None and any(
            g.dtype.itemsize > p.dtype.itemsize for g, p in zip(leaves_of(updates), leaves_of(params))
        ):
            # Before the cast: the parameter's dtype may not hold gradients that still have their loss scale.
            updates, scale = scaled(updates, scale), None
        grads = tree_map(lambda g, p: g.to(p.dtype), updates, params)
        state, move = step(params, grads, state, scale, shards)
        move.write(params, copies, shards)
        return state

    return GradientTransformation(init, update, locality, apply=apply, owns=owns, sends=sends, last=last)


def each_tensor(fn: Callable[..., Any], *trees: Tree) -> None:
    """Call ``fn(*tensors)`` for each leaf's tensors in the trees. For kernels, which read memory once."""
    for tensors in zip(*map(leaves_of, trees), strict=True):
        fn(*tensors)


def each(fn: Callable[..., Any], *trees: Tree) -> None:
    """Call ``fn(*tensors)``, elementwise and in place, for each leaf's tensors in the trees, a chunk at a time."""
    for tensors in zip(*map(leaves_of, trees), strict=True):
        for chunk in chunks(tensors):
            fn(*chunk)


def each_leaf(shards: Shards, fn: Callable[..., Any], *trees: Tree) -> None:
    """Call ``fn(number, *tensors)`` as `each` does, with the parameter's number."""
    for number, tensors in shards.leaves(*trees):
        for chunk in chunks(tensors):
            fn(number, *chunk)
