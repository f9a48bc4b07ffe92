"""A graph cut in parts that run one after the other, with other work between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.fx import Graph, Node

from shardlib.execute.graph.accumulate import accumulate
from shardlib.execute.graph.fuse import Inductor, module_of
from shardlib.execute.graph.nodes import changes, copied
from shardlib.execute.graph.overlap import overlap
from shardlib.execute.graph.trace import FORWARD, PHASE, Traced

Store = dict[Node, Any]  # nodes of the whole graph -> the values that later parts take


class GraphPart:
    """A part of a graph.

    Args:
        inputs: of the whole graph, which each part is given.

    Attributes:
        graph: of the part.
        takes: the nodes of the whole graph whose values it takes from the store.
    """

    def __init__(self, whole: Traced, members: Sequence[Node], results: Sequence[Node], inputs: Sequence[Node]) -> None:
        own = {*members, *inputs}
        used = [each for node in members for each in node.all_input_nodes]
        self.takes = list(dict.fromkeys(node for node in (*used, *results) if node not in own))
        self._whole, self._members, self._results, self._inputs = whole, members, results, inputs

    def finish(self, later: Sequence[GraphPart], gradients: int, overlaps: bool, inductor: Inductor | None) -> None:
        """Make the part's graph, once it is known what ``later`` ones take."""
        taken = {node for part in later for node in part.takes}
        self._makes = [node for node in self._members if node in taken]
        self._stays = taken.intersection(self.takes)
        self.graph = graph = Graph()
        given = graph.placeholder("given")
        known = {node: graph.node_copy(node) for node in self._inputs}
        for node in reversed(self.takes):
            # From the end of a list, so that each goes with its last use: an argument would stay until the end.
            known[node] = graph.call_method("pop", (given,))
            known[node].meta = dict(node.meta)
        for node in self._members:
            copied(node, known, graph)
        graph.output([known[node] for node in (*self._results, *self._makes)])
        if overlaps:
            overlap(graph)
        if not later:
            accumulate(graph, len(self._results) - gradients, gradients)
        self._run = module_of(self._whole.constants, graph, inductor)

    @property
    def computes(self) -> bool:
        """Whether there is anything in it."""
        return bool(self._members)

    def __call__(self, store: Store, inputs: Sequence[Any]) -> list[Any]:
        """The part's results. ``inputs`` are those that each part is given, and for the last one sums of gradients."""
        values = [store[node] if node in self._stays else store.pop(node) for node in self.takes]
        found = self._run(values, *inputs)
        results = len(found) - len(self._makes)
        store.update(zip(self._makes, found[results:], strict=True))
        return found[:results]


def cut(
    whole: Traced,
    results: Sequence[Sequence[Node]],
    inputs: Sequence[Node],
    stored: Sequence[Node],
    gradients: int,
    overlaps: bool,
    inductor: Inductor | None,
) -> list[GraphPart]:
    """Forward, and backward in one part or in two: what its first results need, and the rest.

    Args:
        results: of forward, and of each part of backward.
        gradients: how many results, the last ones, are gradients to be added to sums.
        inputs: what each part is given.
        stored: nodes whose values the caller stores.
        overlaps: whether exchanges start before they are waited for.
        inductor: see `optimise`.
    """
    outside = {*inputs, *stored}
    nodes = [node for node in whole.graph.nodes if node.op != "output" and node not in outside]
    forward, backward = (
        [node for node in nodes if (node.meta.get(PHASE) == FORWARD) is first] for first in (True, False)
    )
    parts = [GraphPart(whole, forward, results[0], inputs)]
    if len(results) == 3:
        # What is written to has no one value: then all of it is the first part.
        first = set(backward) if any(map(changes, backward)) else _needed(results[1], set(backward))
        parts.append(GraphPart(whole, [node for node in backward if node in first], results[1], inputs))
        backward = [node for node in backward if node not in first]
    parts.append(GraphPart(whole, backward, results[-1], inputs))
    for number, part in enumerate(parts):
        part.finish(parts[number + 1 :], gradients, overlaps, inductor)
    return parts


def _needed(results: Sequence[Node], among: set[Node]) -> set[Node]:
    found, todo = set[Node](), list(results)
    while todo:
        node = todo.pop()
        if node in among and node not in found:
            found.add(node)
            todo += node.all_input_nodes
    return found
