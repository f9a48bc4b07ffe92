"""Keys inside a trace, whose seeds and places in the global batch become inputs of the graph."""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import torch

from shardlib.common._compat import expression_of, number_at
from shardlib.errors import IllegalComposition
from shardlib.execute.graph.nodes import added_input, marks_of
from shardlib.kernels.counter import signed
from shardlib.rng import Key

# The numbers that stand for seeds, one after the other, and for indices of first elements, with room for those that follow
# each; and the seed of every key. No number of a program's own is near.
_SEEDS, _STARTS, _ROOM, _UNKNOWN = 0x2B5A_0F1D_77C4_0000, 0x3A91_5C00_0000_0000, 1 << 44, 0x2B5A_0F1D_77C3_FFFF

Path = tuple[int | str, ...]  # what is folded into the step's key, one after the other


class Stands:
    """The numbers that stand in one trace for what keys give to draws: a seed, and the index of a first element.

    Attributes:
        draws: the path of the key of each draw and its number of elements per share of the batch -> the draw's number.
    """

    def __init__(self) -> None:
        self.draws: dict[tuple[Path, Any], int] = {}
        self._given = False  # whether there is a key

    def key(self, slot: int | Fraction) -> TracedKey:
        """The key that a traced function is given for a micro-batch."""
        self._given = True
        return TracedKey(_UNKNOWN, slot, (), self)

    def stretch(self, path: Path, count: int) -> tuple[int, int]:
        """The numbers that stand for what `shardlib.Key.stretch` gives."""
        number = self.draws.setdefault((path, expression_of(count)), len(self.draws))
        return _SEEDS + number, _STARTS + number * _ROOM

    def values(self, key: Key, lengths: Mapping[Any, Any]) -> list[int]:
        """What a graph is given for a step's ``key``, as operators take it, in the order of `made_inputs`. ``lengths``: see
        `shardlib.execute.graph.recorder.Lengths.values`."""
        found = []
        for path, count in self.draws:
            made = key
            for data in path:
                made = made.fold_in(data)
            seed, first = made.stretch(number_at(count, lengths))
            found += [signed(seed), first]
        return found

    def made_inputs(self, graph: torch.fx.Graph) -> None:
        """Make the numbers in a graph inputs of it, after those that it has.

        Raises:
            IllegalComposition: a draw that reached no operator as it is, so that the graph would draw the same in every step.
        """
        if not self._given:
            return
        last = next(node for node in reversed(graph.nodes) if node.op == "placeholder")
        inputs: dict[int, torch.fx.Node] = {}
        for number in reversed(range(len(self.draws))):  # each goes in front of those before it
            with graph.inserting_after(last):
                inputs[_STARTS + number * _ROOM] = added_input(graph, f"start_{number}")
            with graph.inserting_after(last):
                inputs[_SEEDS + number] = added_input(graph, f"seed_{number}")
        used: set[int] = set()

        def given(value: Any) -> Any:
            if type(value) is not int:
                return value
            number = value if value in inputs else value - (value - _STARTS) % _ROOM
            if number not in inputs:
                used.add(value)
                return value
            used.add(number)
            stand = inputs[number]
            if value == number:
                return stand
            added = graph.call_function(operator.add, (stand, value - number))
            added.meta = marks_of(node)
            return added

        for node in list(graph.nodes):
            if any(number >= _UNKNOWN for number in _numbers([node.args, node.kwargs])):
                with graph.inserting_before(node):
                    node.args = torch.fx.node.map_aggregate(node.args, given)
                    node.kwargs = torch.fx.node.map_aggregate(node.kwargs, given)
        unused = [path for (path, _), number in self.draws.items() if _SEEDS + number not in used]
        if unused or _UNKNOWN in used:
            paths = ", ".join("/".join(map(str, path)) or "the step's key" for path in dict.fromkeys(unused)) or "a key"
            raise IllegalComposition(
                f"a graph draws the same numbers in every step by rng folded with {paths}. Use sl.dropout, or draw "
                "outside the loss"
            )


def _numbers(arguments: Any) -> Iterator[int]:
    """The numbers among a node's arguments."""
    for each in arguments.values() if isinstance(arguments, dict) else arguments:
        if type(each) is int:
            yield each
        elif isinstance(each, tuple | list | dict):
            yield from _numbers(each)


@dataclass(frozen=True, eq=False)
class TracedKey(Key):
    """A key of which only the way is known on which it was made from the step's.

    Attributes:
        path: what was folded into the step's key.
        stands: what notes its draws.
    """

    path: Path = ()
    stands: Stands = field(default_factory=Stands, repr=False)

    def __getattribute__(self, name: str) -> Any:
        if name == "seed" and not sys._getframe(1).f_globals["__name__"].startswith(("shardlib.", "dataclasses")):
            raise IllegalComposition(
                "the loss function reads rng.seed, which a graph would do once for all steps. Draw by sl.dropout(x, p, rng)"
            )
        return super().__getattribute__(name)

    def fold_in(self, data: int | str) -> TracedKey:
        return replace(self, path=(*self.path, data))

    def stretch(self, count: int) -> tuple[int, int]:
        return self.stands.stretch(self.path, count)
