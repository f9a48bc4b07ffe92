"""Keys inside a trace, whose seeds become inputs of the graph."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import torch

from shardlib.errors import IllegalComposition
from shardlib.kernels.counter.op import signed
from shardlib.rng import Key

_FIRST = 0x2B5A_0F1D_77C4_0000  # of the numbers that stand for seeds; no number of a program's own is near


class Stands:
    """The numbers that stand for seeds in one trace.

    Attributes:
        paths: number -> what is folded into the step's key, one after the other, to make the key whose seed it stands for.
        drawn: the numbers of keys by which the program drew.
    """

    def __init__(self) -> None:
        self.paths: dict[int, tuple[int | str, ...]] = {}
        self.drawn: set[int] = set()
        self._numbers = itertools.count(_FIRST)

    def key(self, slot: int | Fraction) -> TracedKey:
        """The key that a traced function is given for a micro-batch."""
        return TracedKey(self.number(()), slot, (), self)

    def number(self, path: tuple[int | str, ...]) -> int:
        number = next(self._numbers)
        self.paths[number] = path
        return number

    def seeds(self, key: Key) -> list[int]:
        """The seeds that a graph is given for ``key``, as operators take them, in the order of `made_inputs`."""
        found = []
        for number in sorted(self.drawn):
            made = key
            for data in self.paths[number]:
                made = made.fold_in(data)
            found.append(signed(made.seed))
        return found

    def made_inputs(self, graph: torch.fx.Graph) -> None:
        """Make the numbers in a graph inputs of it, after those that it has.

        Raises:
            IllegalComposition: a draw that reached no operator as it is, so that the graph would draw the same in every step.
        """
        last = next(node for node in reversed(graph.nodes) if node.op == "placeholder")
        found: dict[int, torch.fx.Node] = {}
        with graph.inserting_after(last):
            for number in sorted(self.drawn, reverse=True):  # each goes in front of those before it
                found[number] = graph.placeholder(f"seed_{number - _FIRST}")
        used: set[int] = set()

        def seed(value: Any) -> Any:
            if type(value) is int and value in found:
                used.add(value)
                return found[value]
            return value

        for node in graph.nodes:
            if node.op == "call_function":
                node.args = torch.fx.node.map_aggregate(node.args, seed)
                node.kwargs = torch.fx.node.map_aggregate(node.kwargs, seed)
        if missing := self.drawn - used:
            paths = ", ".join("/".join(map(str, self.paths[number])) or "the step's key" for number in sorted(missing))
            raise IllegalComposition(
                f"numbers drawn by rng, folded with {paths}, are computed from its seed outside of an operator, and a graph "
                "would draw the same in every step. Draw by sl.dropout, or by sl.rng.uniform outside of the loss"
            )


@dataclass(frozen=True)
class TracedKey(Key):
    """A key of which only the way is known on which it was made from the step's.

    Attributes:
        path: what was folded into the step's key.
        stands: what notes its draws.
    """

    path: tuple[int | str, ...] = ()
    stands: Stands = field(default_factory=Stands, compare=False, repr=False)

    def fold_in(self, data: int | str) -> TracedKey:
        path = (*self.path, data)
        return replace(self, seed=self.stands.number(path), path=path)

    def stretch(self, count: int) -> tuple[int, int]:
        first = self.slot * count
        if first != int(first):
            raise IllegalComposition(
                "numbers are drawn for a share of the batch that is no whole number of shares: with compile=True give every "
                "rank equally many rows"
            )
        self.stands.drawn.add(self.seed)
        return self.seed, int(first)
