"""What of a stage's graph the first half of its backward can leave for the second: matmuls by parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, saved_tensors_hooks

from shardlib._compat import factor_of_product, saving_hooks
from shardlib.execute.handles import Handle
from shardlib.execute.saving import Kept
from shardlib.execute.units import BucketState, attached

_Nexts = tuple[tuple[Any, int], ...]
_Leaves = frozenset[Any] | None
_NONE: frozenset[Any] = frozenset()
# Name of a node -> the names of its two factors, and the place of the first among the node's inputs.
_PRODUCTS: dict[str, tuple[tuple[str, str], int]] = {
    "MmBackward0": (("self", "mat2"), 0),
    "BmmBackward0": (("self", "mat2"), 0),
    "AddmmBackward0": (("mat1", "mat2"), 1),
    "BaddbmmBackward0": (("batch1", "batch2"), 1),
}


@dataclass(frozen=True, eq=False)
class Product:
    """A matmul of the graph, whose gradient towards a weight is left for later.

    Attributes:
        edge: where that gradient goes.
        leaves: the nodes of the parameters that it reaches.
        other: the other factor's name in the node.
        side: the weight's place in the product, 0 or 1.
        by_columns: whether the weight lies in memory column by column, as its gradient then should.
    """

    node: Any
    edge: GradientEdge
    leaves: frozenset[Any]
    other: str
    side: int
    by_columns: bool

    def factor(self) -> torch.Tensor:
        """The other factor. To be asked for once, while autograd is about to run the node."""
        return getattr(self.node, f"_saved_{self.other}").detach()

    def states(self) -> frozenset[BucketState]:
        return frozenset(leaf.next_functions[0][0].state for leaf in self.leaves)


class Parting(NamedTuple):
    """Attributes:

    now: nodes of the parameters whose gradients the first half finds, in an order that is the same on every rank.
    later: what is left for the second.
    """

    now: list[Any]
    later: list[Product]


def part(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Parting:
    """Part the graph of ``outputs`` whose leaves are ``inputs`` and parameters."""
    roots = [output.grad_fn for output in outputs if output.grad_fn is not None]
    after, below = _walk(roots, {id(leaf) for leaf in inputs})
    now = {leaf for root in roots for leaf in below[root] or ()}
    later = []
    for node, nexts in after.items():
        if below[node] is not None:
            continue
        for place, (child, number) in enumerate(nexts):
            if leaves := below[child]:  # from here on the way leads to parameters alone
                product = _product(node, place, edge(child, number, node), leaves)
                if product is None:
                    now |= leaves
                else:
                    later.append(product)
    now |= {leaf for product in later for leaf in product.leaves if handle_of(leaf) is not None}
    # Autograd goes wherever something wanted can be reached: a product that leads to it cannot wait.
    while early := [product for product in later if not now.isdisjoint(product.leaves)]:
        now.update(*(product.leaves for product in early))
        later = [product for product in later if product not in early]
    return Parting([node for node in after if node in now], later)


def edge(node: Any, number: int, owner: Any) -> GradientEdge:
    """An edge that outlives the graph above it: a node made in Python lives only as long as one that leads to it."""
    return GradientEdge(node, number, owner if isinstance(node, BackwardCFunction) else None)


def handle_of(node: Any) -> Handle | None:
    """The handle whose own gradient a node is."""
    variable = None if node.next_functions else getattr(node, "variable", None)
    return variable if isinstance(variable, Handle) else None


def _walk(roots: list[Any], inputs: set[int]) -> tuple[dict[Any, _Nexts], dict[Any, _Leaves]]:
    """Node -> the nodes it leads to, each after those; and node -> the parameters' nodes among all it leads to.

    A parameter leads no further. What leads to an input (they are given by identity) has None.
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


def _union(sets: list[_Leaves]) -> _Leaves:
    whole = _NONE
    for one in sets:
        if one is None:
            return None
        if one is not whole:
            whole = whole | one if whole else one
    return whole


def _product(node: Any, place: int, towards: GradientEdge, leaves: frozenset[Any]) -> Product | None:
    """The product whose input ``place`` is a weight; None where it is none, or not one that can be left for later."""
    if node.name() not in _PRODUCTS:
        return None
    factors, first = _PRODUCTS[node.name()]
    side = place - first
    if side < 0 or factor_of_product(node) != 1:
        return None
    weight, other = factors[side], factors[1 - side]
    # Foreign hooks, such as those of a user's own checkpoint, may hand a tensor out only once.
    if not isinstance(getattr(node, f"_raw_saved_{other}").data, (torch.Tensor, Kept, _Twice)):
        return None
    by_columns = getattr(node, f"_saved_{weight}_sym_strides", (0,))[0] == 1
    return Product(node, towards, leaves, other, side, by_columns)


class _Twice:
    """A saved tensor, packed, that the hooks below hand out once: whoever asks first leaves it for the next."""

    def __init__(self, packed: Any, unpack: Callable[[Any], torch.Tensor]) -> None:
        self._packed, self._unpack = packed, unpack
        self._value: torch.Tensor | None = None

    def value(self) -> torch.Tensor:
        if self._value is None:
            self._value = self._unpack(self._packed)
        return self._value


def readable_twice() -> AbstractContextManager[Any]:
    """What is saved meanwhile can be asked for by `Product.factor` and then by its node, under torch's checkpoint too."""
    hooks = saving_hooks()
    if hooks is None:
        return nullcontext()
    pack, unpack = hooks
    return saved_tensors_hooks(lambda tensor: _Twice(pack(tensor), unpack), _Twice.value)
