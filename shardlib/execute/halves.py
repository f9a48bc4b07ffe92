"""A backward in two halves: first the inputs' gradients, which another stage waits for, later the matmuls' weights'.

The first half is the whole backward but for the products that give the gradients of weights: of each it keeps the two
factors (a layer's input and the gradient of its output), and autograd lets go of the rest. The second half multiplies
them. Neither walks where the other has been, so together they compute what one backward does (arXiv 2401.10241).

Under remat too the factors are kept meanwhile, instead of computed twice.

What is no plain matmul by a parameter belongs to the first half: biases and norms, whose gradients cost little; a
compiled block, or a function with its own backward; and matmuls in a checkpoint that is not the plan's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch.autograd.graph import GradientEdge

from shardlib._compat import grad
from shardlib.execute.products import Product, edge, handle_of, part
from shardlib.execute.units import BucketState


class Halves:
    """The backward of one micro-batch in one stage, between its first half and its second.

    Attributes:
        inputs: the gradients of the stage's inputs.
        reached: those that reached handles themselves, by path.
    """

    def __init__(
        self, outputs: Sequence[torch.Tensor], seeds: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> None:
        self._parts: list[_Part] = []
        self.reached: dict[str, torch.Tensor] = {}
        now, later = part(outputs, inputs)
        hooks = [product.node.register_prehook(partial(self._keep, product)) for product in later]
        try:
            found = grad(outputs, [*inputs, *(GradientEdge(leaf, 0) for leaf in now)], seeds)
        finally:
            for hook in hooks:  # they hold the nodes that hold them
                hook.remove()
        self.inputs = found[: len(inputs)]
        for leaf, value in zip(now, found[len(inputs) :], strict=True):
            if value is not None and (handle := handle_of(leaf)) is not None:
                self.reached[handle._path] = value
            elif value is not None:
                attach, number = leaf.next_functions[0]
                self._parts.append(_Part(edge(attach, number, leaf), frozenset([attach.state]), value, None))

    def _keep(self, product: Product, grads: tuple[torch.Tensor | None, ...]) -> None:
        if grads[0] is not None:
            self._parts.append(_Part(product.edge, product.states(), grads[0], _Factor(product)))

    def weights_gradient(self) -> None:
        """The second half, bucket by bucket, in the order of backward."""
        groups = _by_bucket(self._parts)
        self._parts = []
        while groups:
            states, parts = groups.pop(0)
            edges, grads = [one.edge for one in parts], []
            while parts:  # the factors go as their products come
                grads.append(parts.pop(0).gradient())
            grad(edges, [state.anchor for state in states if state.anchor is not None], grads)


class _Factor:
    """What a gradient is to be multiplied by: of y = a @ b, that of a is g @ bᴴ, that of b is aᴴ @ g."""

    def __init__(self, product: Product) -> None:
        self._value, self._side, self._by_columns = product.factor(), product.side, product.by_columns

    def times(self, grad: torch.Tensor) -> torch.Tensor:
        other = self._value
        if self._side == 0:
            return (other.conj() @ grad.mT).mT if self._by_columns else grad @ other.mH
        return (grad.mT @ other.conj()).mT if self._by_columns else other.mH @ grad


class _Part(NamedTuple):
    """A gradient on its way to buckets: itself, or the factors of which it is the product."""

    edge: GradientEdge
    states: frozenset[BucketState]
    grad: torch.Tensor
    factor: _Factor | None

    def gradient(self) -> torch.Tensor:
        return self.grad if self.factor is None else self.factor.times(self.grad)


def _by_bucket(parts: Iterable[_Part]) -> list[tuple[frozenset[BucketState], list[_Part]]]:
    """Each bucket's parts together, for its gradient is handed on once; in the order of their last products."""
    groups: list[tuple[frozenset[BucketState], list[_Part]]] = []
    for one in sorted(parts, key=lambda one: one.factor is not None):
        joined = [group for group in groups if not group[0].isdisjoint(one.states)]
        groups = [group for group in groups if group[0].isdisjoint(one.states)]
        states = one.states.union(*(group[0] for group in joined))
        groups.append((states, [*(other for group in joined for other in group[1]), one]))
    return groups
