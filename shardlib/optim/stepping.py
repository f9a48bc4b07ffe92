"""One algorithm as both a pure ``update`` and an ``apply`` in place.

The algorithm is a *step*, ``step(params, grads, state, scale, shards) -> (state, Move)``: it may use up the memory of its
gradients and of its state, and leaves parameters as they are; where they go is told by the `Move`. ``update`` runs it on
copies. The elements go through the same operations in both, so both give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from shardlib.mesh.chunks import chunks
from shardlib.optim.base import GradientTransformation, Owned, scaled, separate_copy, write_copies
from shardlib.optim.locality import Locality
from shardlib.optim.shards import Shards
from shardlib.tree import Tree, leaves_of, tree_map


@dataclass(frozen=True)
class Move:
    """Where parameters go.

    Attributes:
        fn: ``fn(param, *parts)``, of each element alone: by how much it moves, in memory that may be written to. May also
            finish ``parts`` in place.
        parts: trees like the parameters.
        factors: for each parameter what ``fn`` gives is to be multiplied by, ``[leaf_count]``; None for 1.
        absolute: whether ``fn`` gives where it goes instead.
        in_place: ``in_place(param, *parts, copy=copy)``: moves a parameter by what ``fn`` gives, to the last bit, and writes
            to its copy in another dtype, or None, as well. Where it is given, ``fn`` serves ``update`` alone.
    """

    fn: Callable[..., torch.Tensor]
    parts: Sequence[Tree] = field(default=())
    factors: torch.Tensor | None = None
    absolute: bool = False
    in_place: Callable[..., None] | None = None

    def updates(self, params: Tree, shards: Shards) -> Tree:
        """By how much, as a tree of its own."""
        found = tree_map(self.fn, params, *self.parts)
        if self.absolute:
            return tree_map(torch.sub, found, params)
        if self.factors is not None:
            for number, (part,) in shards.leaves(found):
                part.mul_(self.factors[number])
        return found

    def write(self, params: Tree, copies: Tree, shards: Shards) -> None:
        """Move ``params`` in place; ``copies`` as in `GradientTransformation.apply`."""
        if self.in_place is not None:
            for param, copy, *parts in zip(*map(leaves_of, (params, copies, *self.parts)), strict=True):
                self.in_place(param, *parts, copy=separate_copy(copy, param))
            return

        def place(p: torch.Tensor, *parts: torch.Tensor) -> None:
            p.copy_(self.fn(p, *parts))

        def add(p: torch.Tensor, *parts: torch.Tensor) -> None:
            p.add_(self.fn(p, *parts))

        def add_leaf(factors: torch.Tensor, number: int, p: torch.Tensor, *parts: torch.Tensor) -> None:
            p.add_(self.fn(p, *parts).mul_(factors[number]))

        if self.factors is not None:
            each_leaf(shards, partial(add_leaf, self.factors), params, *self.parts)
        else:
            each(place if self.absolute else add, params, *self.parts)
        write_copies(copies, params)


Step = Callable[[Tree, Tree, Any, torch.Tensor | None, Shards], tuple[Any, Move]]


def stepping(
    name: str,
    init: Callable[..., Tree],
    step: Step,
    locality: Locality,
    owns: Owned | None = None,
    sends: Callable[[Shards], Mapping[str, int]] | None = None,
    last: str | None = None,
) -> GradientTransformation:
    """The gradient transformation whose one step this is."""

    def update(updates: Tree, state: Tree, params: Tree, *, shards: Shards) -> tuple[Tree, Tree]:
        if params is None:
            raise ValueError(f"{name} needs the parameters it moves: update(updates, state, params)")
        grads = tree_map(lambda g, p: g.to(p.dtype, copy=True), updates, params)
        state, move = step(params, grads, tree_map(torch.clone, state), None, shards)
        return move.updates(params, shards), state

    def apply(
        params: Tree, updates: Tree, state: Tree, scale: torch.Tensor | None, shards: Shards, copies: Tree
    ) -> Tree:
        if scale is not None and any(
            g.dtype.itemsize > p.dtype.itemsize for g, p in zip(leaves_of(updates), leaves_of(params))
        ):
            # First: the parameter's dtype may not hold what is still multiplied by a loss scale.
            updates, scale = scaled(updates, scale), None
        grads = tree_map(lambda g, p: g.to(p.dtype), updates, params)
        state, move = step(params, grads, state, scale, shards)
        move.write(params, copies, shards)
        return state

    return GradientTransformation(init, update, locality, apply=apply, owns=owns, sends=sends, last=last)


def each_tensor(fn: Callable[..., Any], *trees: Tree) -> None:
    """``fn(*tensors)`` of the trees, which passes over memory once by itself."""
    for tensors in zip(*map(leaves_of, trees), strict=True):
        fn(*tensors)


def each(fn: Callable[..., Any], *trees: Tree) -> None:
    """``fn(*tensors)`` of the trees, which writes to some of them; each element alone."""
    for tensors in zip(*map(leaves_of, trees), strict=True):
        for parts in chunks(tensors):
            fn(*parts)


def each_leaf(shards: Shards, fn: Callable[..., Any], *trees: Tree) -> None:
    """``fn(number, *tensors)``, as `each`, with the parameter's number."""
    for number, tensors in shards.leaves(*trees):
        for parts in chunks(tensors):
            fn(number, *parts)
