"""A backward in two halves, and the matmuls by parameters which the first one leaves for the second."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, saved_tensors_hooks

from shardlib.common._compat import factor_of_product, grad, saving_hooks
from shardlib.common.environment import environment
from shardlib.execute.handles import Handle
from shardlib.execute.phases import Phase
from shardlib.execute.saving import Saved
from shardlib.execute.units import BucketState, attached

# The matmuls by parameters in a stage's graph, which the first half of its backward leaves for the second.


_Nexts = tuple[tuple[Any, int], ...]
_Leaves = frozenset[Any] | None
_NONE: frozenset[Any] = frozenset()
# Name of a node -> the names of its two factors, and the position of the first among the node's inputs.
_PRODUCTS: dict[str, tuple[tuple[str, str], int]] = {
    "MmBackward0": (("self", "mat2"), 0),
    "BmmBackward0": (("self", "mat2"), 0),
    "AddmmBackward0": (("mat1", "mat2"), 1),
    "BaddbmmBackward0": (("batch1", "batch2"), 1),
}


@dataclass(frozen=True, eq=False)
class Product:
    """A matmul of the graph, whose gradient of a weight is left for the second half.

    Attributes:
        node: the matmul's node.
        edge: the edge from the node towards the weight.
        leaves: the nodes of the parameters that the weight's gradient reaches.
        other: the name, in the node, of the factor that is not the weight.
        side: the weight's position in the product, 0 or 1.
        by_columns: whether the weight lies in memory column by column, as its gradient then should, too.
    """

    node: Any
    edge: GradientEdge
    leaves: frozenset[Any]
    other: str
    side: int
    by_columns: bool

    def factor(self) -> torch.Tensor:
        """The factor that is not the weight. May be called once, in a hook that runs right before the node."""
        return getattr(self.node, f"_saved_{self.other}").detach()

    def states(self) -> frozenset[BucketState]:
        return frozenset(leaf.next_functions[0][0].state for leaf in self.leaves)


class Division(NamedTuple):
    """The work of the two halves of a backward.

    Attributes:
        now: nodes of the parameters whose gradients the first half computes, in an order that is the same on every rank, each
            with a node that leads to it.
        later: the products that are left for the second half.
    """

    now: dict[Any, Any]
    later: list[Product]


def divide(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Division:
    """Divide the graph of ``outputs``, whose leaves are ``inputs`` and parameters, between the halves of its backward."""
    roots = [output.grad_fn for output in outputs if output.grad_fn is not None]
    after, below = _walk(roots, {id(leaf) for leaf in inputs})
    now = {leaf for root in roots for leaf in below[root] or ()}
    later = []
    for node, nexts in after.items():
        if below[node] is not None:
            continue
        for position, (child, number) in enumerate(nexts):
            if leaves := below[child]:  # below this child are parameters only, and no input
                product = _product(node, position, edge(child, number, node), leaves)
                if product is None:
                    now |= leaves
                else:
                    later.append(product)
    now |= {leaf for product in later for leaf in product.leaves if handle_of(leaf) is not None}
    # In the second half, products hand over their gradients before any node runs. At a node that others reach by way of nodes
    # they would be added in another order than in one backward, and round otherwise.
    handed = {product.edge.node for product in later}
    now.update(*(product.leaves for product in later if not handed.isdisjoint(_beneath(product.edge.node, after))))
    # Autograd runs every node from which a wanted leaf can be reached. A product above such a leaf cannot wait.
    while early := [product for product in later if not now.isdisjoint(product.leaves)]:
        now.update(*(product.leaves for product in early))
        later = [product for product in later if product not in early]
    above = {child: node for node, nexts in after.items() for child, _ in nexts if child in now}
    return Division({node: above.get(node, node) for node in after if node in now}, later)


def edge(node: Any, number: int, owner: Any) -> GradientEdge:
    """An edge that stays valid when the graph above it is freed: it keeps ``owner`` alive, which leads to ``node``.

    Autograd keeps nodes of C++ alive by itself; a node made in Python lives only as long as a node that leads to it.
    """
    return GradientEdge(node, number, owner if isinstance(node, BackwardCFunction) else None)


def handle_of(node: Any) -> Handle | None:
    """The handle whose gradient a node accumulates; None for other nodes."""
    variable = None if node.next_functions else getattr(node, "variable", None)
    return variable if isinstance(variable, Handle) else None


def _walk(roots: list[Any], inputs: set[int]) -> tuple[dict[Any, _Nexts], dict[Any, _Leaves]]:
    """The graph below ``roots``: node -> next nodes, in topological order, leaves first; and node -> parameters below it.

    Parameters have no next nodes. A node above an input has None instead of the parameters below it.

    Args:
        inputs: identities of the inputs.
    """
    nexts: dict[Any, _Nexts] = {}
    after: dict[Any, _Nexts] = {}
    below: dict[Any, _Leaves] = {None: _NONE}
    todo = list(roots)
    while todo:
        node = todo[-1]
        if node not in nexts:
            nexts[node] = node.next_functions
            if nexts[node] and not attached(nexts[node]):
                todo += [child for child, _ in nexts[node] if child not in nexts and child is not None]
                continue
        todo.pop()
        if node in after:
            continue
        after[node] = given = nexts[node]
        if attached(given):
            after[node], below[node] = (), frozenset([node])
        elif given:
            below[node] = _union([below[child] for child, _ in given])
        elif id(getattr(node, "variable", None)) in inputs:
            below[node] = None
        else:
            below[node] = _NONE if handle_of(node) is None else frozenset([node])
    return after, below


def _beneath(node: Any, after: Mapping[Any, _Nexts]) -> set[Any]:
    """The nodes that can be reached from a node, without itself."""
    found: set[Any] = set()
    todo = [node]
    while todo:
        new = {child for child, _ in after[todo.pop()] if child is not None} - found
        found |= new
        todo += new
    return found


def _union(sets: list[_Leaves]) -> _Leaves:
    union = _NONE
    for leaves in sets:
        if leaves is None:
            return None
        if leaves is not union:
            union = union | leaves if union else leaves
    return union


def _product(node: Any, position: int, towards: GradientEdge, leaves: frozenset[Any]) -> Product | None:
    """The product at ``node`` with a weight at input ``position``; None if the node cannot be left for the second half."""
    if node.name() not in _PRODUCTS:
        return None
    factors, first = _PRODUCTS[node.name()]
    side = position - first
    if side < 0 or factor_of_product(node) != 1:
        return None
    weight, other = factors[side], factors[1 - side]
    # Other hooks for saved tensors, such as those of a user's own checkpoint, may allow only one read.
    if not isinstance(getattr(node, f"_raw_saved_{other}").data, (torch.Tensor, Saved, _Twice)):
        return None
    by_columns = getattr(node, f"_saved_{weight}_sym_strides", (0,))[0] == 1
    return Product(node, towards, leaves, other, side, by_columns)


class _Twice:
    """A packed saved tensor, for hooks that unpack a tensor only once. The first read keeps the result for the second."""

    def __init__(self, packed: Any, unpack: Callable[[Any], torch.Tensor]) -> None:
        self._packed, self._unpack = packed, unpack
        self._value: torch.Tensor | None = None

    def value(self) -> torch.Tensor:
        if self._value is None:
            self._value = self._unpack(self._packed)
        return self._value


def readable_twice() -> AbstractContextManager[Any]:
    """A context in which saved tensors can be read twice, by `Product.factor` and by the node, also in torch's checkpoint."""
    hooks = saving_hooks()
    if hooks is None:
        return nullcontext()
    pack, unpack = hooks
    return saved_tensors_hooks(lambda tensor: _Twice(pack(tensor), unpack), _Twice.value)


# A backward in two halves: first the gradients of inputs, which another stage waits for, later those of matmuls' weights.
# The first half runs the whole backward except the products that give weights' gradients. It keeps the two factors of each
# product (a layer's input and the gradient of its output), and autograd frees the rest of the graph. The second half
# computes the products. No node of the graph runs in both halves, so together they compute the same as one backward (arXiv
# 2401.10241). Under remat the factors are kept between the halves as well, instead of being recomputed.
# Gradients of other parameters belong to the first half: biases and norms, which cost little; parameters of a compiled
# block or of a function with its own backward; and matmuls in a checkpoint that is not the plan's.


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
        self.inputs: tuple[Any | None, ...] = grads[: len(inputs)]
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
