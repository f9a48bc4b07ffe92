"""Keys inside a trace, whose seeds and places in the global batch become inputs of the graph."""

from __future__ import annotations

import itertools
import operator
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import torch

from shardlib.errors import BatchError, IllegalComposition
from shardlib.kernels.counter.op import signed
from shardlib.rng import Key

# The numbers that stand for seeds, one after the other, and for indices of first elements, with room for those that follow
# each. No number of a program's own is near.
_SEEDS, _STARTS, _ROOM = 0x2B5A_0F1D_77C4_0000, 0x3A91_5C00_0000_0000, 1 << 44


class Stands:
    """The numbers that stand for seeds, and for indices of elements among the global batch's, in one trace.

    Attributes:
        paths: number -> what is folded into the step's key, one after the other, to make the key whose seed it stands for.
        drawn: the numbers of keys by which the program drew.
        counts: the elements per share of the batch of each index, in the order of their numbers.
    """

    def __init__(self) -> None:
        self.paths: dict[int, tuple[int | str, ...]] = {}
        self.drawn: set[int] = set()
        self.counts: list[int] = []
        self._numbers = itertools.count(_SEEDS)

    def key(self, slot: int | Fraction) -> TracedKey:
        """The key that a traced function is given for a micro-batch."""
        return TracedKey(self.number(()), slot, (), self)

    def number(self, path: tuple[int | str, ...]) -> int:
        number = next(self._numbers)
        self.paths[number] = path
        return number

    def start(self, count: int) -> int:
        """The number that stands for the index of the first of a share's ``count`` elements."""
        if count not in self.counts:
            self.counts.append(count)
        return _STARTS + self.counts.index(count) * _ROOM

    def values(self, key: Key) -> list[int]:
        """What a graph is given for ``key``, as operators take it, in the order of `made_inputs`: seeds, and indices.

        Raises:
            BatchError: a share of the batch that does not begin at a whole number of shares.
        """
        found = []
        for number in sorted(self.drawn):
            made = key
            for data in self.paths[number]:
                made = made.fold_in(data)
            found.append(signed(made.seed))
        starts = [key.slot * count for count in self.counts]
        if any(start != int(start) for start in starts):
            raise BatchError(_UNEVEN)
        return found + [int(start) for start in starts]

    def made_inputs(self, graph: torch.fx.Graph) -> None:
        """Make the numbers in a graph inputs of it, after those that it has.

        Raises:
            IllegalComposition: a draw that reached no operator as it is, so that the graph would draw the same in every step.
        """
        last = next(node for node in reversed(graph.nodes) if node.op == "placeholder")
        inputs: dict[int, torch.fx.Node] = {}
        numbers = [*sorted(self.drawn), *(_STARTS + index * _ROOM for index in range(len(self.counts)))]
        with graph.inserting_after(last):
            for place, number in reversed(list(enumerate(numbers))):  # each goes in front of those before it
                inputs[number] = graph.placeholder(f"draw_{place}")
        used: set[int] = set()

        def given(value: Any) -> Any:
            if type(value) is not int:
                return value
            number = value if value in inputs else value - (value - _STARTS) % _ROOM
            if number not in inputs:
                return value
            used.add(number)
            return (
                inputs[number]
                if value == number
                else graph.call_function(operator.add, (inputs[number], value - number))
            )

        for node in list(graph.nodes):
            if node.op == "call_function":
                with graph.inserting_before(node):
                    node.args = torch.fx.node.map_aggregate(node.args, given)
                    node.kwargs = torch.fx.node.map_aggregate(node.kwargs, given)
        if missing := self.drawn - used:
            paths = ", ".join("/".join(map(str, self.paths[number])) or "the step's key" for number in sorted(missing))
            raise IllegalComposition(
                f"numbers drawn by rng, folded with {paths}, are computed from its seed outside of an operator, and a graph "
                "would draw the same in every step. Draw by sl.dropout, or by sl.rng.uniform outside of the loss"
            )


_UNEVEN = (
    "numbers are drawn for a share of the batch that is no whole number of shares: with compile=True give every rank equally "
    "many rows"
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
        if (self.slot * count) % 1:
            raise IllegalComposition(_UNEVEN)
        self.stands.drawn.add(self.seed)
        return self.seed, self.stands.start(count)
