"""A backward in two halves: first the gradients of inputs, which another stage waits for, later those of matmuls' weights.

The first half runs the whole backward except the products that give weights' gradients. It keeps the two factors of each
product (a layer's input and the gradient of its output), and autograd frees the rest of the graph. The second half computes
the products. No node of the graph runs in both halves, so together they compute the same as one backward
(arXiv 2401.10241). Under remat the factors are kept between the halves as well, instead of being recomputed.

Gradients of other parameters belong to the first half: biases and norms, which cost little; parameters of a compiled block
or of a function with its own backward; and matmuls in a checkpoint that is not the plan's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge

from shardlib.common._compat import grad
from shardlib.common.environment import environment
from shardlib.execute.phases import Phase
from shardlib.execute.products import Product, divide, edge, handle_of
from shardlib.execute.units import BucketState


class Halves:
    """The backward of one micro-batch in one stage. The constructor runs the first half.

    Attributes:
        inputs: the gradients of the stage's inputs.
        reached: path -> gradient that arrived at the leaf's handle.
    """

    def __init__(
        self, outputs: Sequence[torch.Tensor], seeds: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> None:
        self._gradients: list[_Gradient] = []
        self._phases = environment().phases
        self.reached: dict[str, torch.Tensor] = {}
        now, later = divide(outputs, inputs)
        hooks = [product.node.register_prehook(partial(self._keep, product)) for product in later]
        came: dict[Any, Phase | None] = {}  # node of a parameter -> the phase in which its gradient came

        def note(leaf: Any, grads: Any) -> None:
            came[leaf] = self._phase()

        if self._phases is not None:
            hooks += [above.register_prehook(partial(note, leaf)) for leaf, above in now.items()]
        try:
            grads = grad(outputs, [*inputs, *(GradientEdge(leaf, 0) for leaf in now)], seeds)
        finally:
            for hook in hooks:  # a hook and its node keep each other alive
                hook.remove()
        self.inputs = grads[: len(inputs)]
        for leaf, value in zip(now, grads[len(inputs) :], strict=True):
            if value is not None and (handle := handle_of(leaf)) is not None:
                self.reached[handle._path] = value
            elif value is not None:
                attach, number = leaf.next_functions[0]
                going = edge(attach, number, leaf)
                self._gradients.append(_Gradient(going, frozenset([attach.state]), value, None, came.get(leaf)))

    def _keep(self, product: Product, grads: tuple[torch.Tensor | None, ...]) -> None:
        if grads[0] is not None:
            factor = _Factor(product)
            self._gradients.append(_Gradient(product.edge, product.states(), grads[0], factor, self._phase()))

    def _phase(self) -> Phase | None:
        """The phase at which backward is, where somebody follows it."""
        return None if self._phases is None else self._phases.at(backward=True)

    def weights_gradient(self) -> None:
        """Run the second half, bucket by bucket, in the order of backward."""
        groups = _by_bucket(self._gradients)
        self._gradients = []
        while groups:
            with self._late(groups[0][1][-1].phase):
                _hand_over(*groups.pop(0))

    def _late(self, phase: Phase | None) -> AbstractContextManager[None]:
        """A context whose work belongs to the phase in which what it begins with has come."""
        return nullcontext() if self._phases is None or phase is None else self._phases.late(phase)


class _Factor:
    """The factor by which an output's gradient g is multiplied: for y = a @ b, g @ bᴴ is a's gradient, and aᴴ @ g b's."""

    def __init__(self, product: Product) -> None:
        self._value, self._side, self._by_columns = product.factor(), product.side, product.by_columns

    def times(self, grad: torch.Tensor) -> torch.Tensor:
        other = self._value
        if self._side == 0:
            return (other.conj() @ grad.mT).mT if self._by_columns else grad @ other.mH
        return (grad.mT @ other.conj()).mT if self._by_columns else other.mH @ grad


class _Gradient(NamedTuple):
    """A gradient for the second half, or the two factors of one.

    Attributes:
        edge: the edge of the graph at which backward goes on with the gradient.
        states: the buckets that the gradient reaches.
        grad: the gradient, or one of its factors.
        factor: the other factor; None if ``grad`` is the gradient.
        phase: in which it came; None where nobody follows the phases.
    """

    edge: GradientEdge
    states: frozenset[BucketState]
    grad: torch.Tensor
    factor: _Factor | None
    phase: Phase | None

    def value(self) -> torch.Tensor:
        return self.grad if self.factor is None else self.factor.times(self.grad)


def _hand_over(states: frozenset[BucketState], gradients: list[_Gradient]) -> None:
    edges, grads = [gradient.edge for gradient in gradients], []
    while gradients:  # each product frees its factors
        grads.append(gradients.pop(0).value())
    grad(edges, [state.anchor for state in states if state.anchor is not None], grads)


def _by_bucket(gradients: Iterable[_Gradient]) -> list[tuple[frozenset[BucketState], list[_Gradient]]]:
    """The gradients in groups that share no bucket, since a bucket's gradient is handed over once, when it is complete.

    Groups are in the order of their last products.
    """
    groups: list[tuple[frozenset[BucketState], list[_Gradient]]] = []
    for gradient in sorted(gradients, key=lambda gradient: gradient.factor is not None):
        joined = [group for group in groups if not group[0].isdisjoint(gradient.states)]
        groups = [group for group in groups if group[0].isdisjoint(gradient.states)]
        states = gradient.states.union(*(group[0] for group in joined))
        groups.append((states, [*(other for group in joined for other in group[1]), gradient]))
    return groups
