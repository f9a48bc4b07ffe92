"""What a graph holds: gathered units at a time, and bytes of messages, from its nodes alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from operator import getitem
from typing import Any

from torch.fx import Graph, Node

from shardlib.collectives.buffers import GATHER, SCATTER, SUM, start_gather, start_scatter, start_sum
from shardlib.execute.graph.nodes import COPIES, RELAID, given, link_at, nbytes, positions, value_of
from shardlib.execute.graph.overlap import wait

_KINDS: dict[Any, str] = {
    GATHER: "gather", start_gather: "gather", SCATTER: "reduce-scatter", start_scatter: "reduce-scatter",
    SUM: "all-reduce", start_sum: "all-reduce",
}  # fmt: skip


def kind_of(node: Node) -> str:
    """What a node exchanges: "gather", "reduce-scatter" or "all-reduce"; "" for other nodes."""
    return _KINDS.get(node.target, "") if node.op == "call_function" else ""


def exchanges(graph: Graph) -> list[Node]:
    """The nodes that exchange, in order."""
    return [node for node in graph.nodes if kind_of(node)]


def order_of(graph: Graph) -> list[tuple[str, str, str, int]]:
    """The exchanges in the order in which they start: kind, label, axis and elements that are given. Equal on all ranks."""
    found = []
    for node in exchanges(graph):
        link = link_at(node)
        found.append((kind_of(node), link.label, link.axis, value_of(given(node)).numel()))
    return found


@dataclass(frozen=True)
class Peak:
    """The most that a graph holds of gathered parameters at a time.

    Attributes:
        units: the units.
        bytes: of whole leaves, and of buffers that are being gathered.
    """

    units: int
    bytes: int


def peak_of_wholes(graph: Graph) -> Peak:
    """What a graph holds of gathered parameters at the worst place, if memory goes with the last use of what lies in it."""
    place = positions(graph)
    owner: dict[Node, Node] = {}  # a node that holds gathered parameters -> the one that made its memory
    unit: dict[Node, str] = {}
    ends: dict[Node, int] = {}
    for node in graph.nodes:
        if kind_of(node) == "gather":
            owner[node], unit[node] = node, link_at(node).label
        elif (node.target is wait or node.target in RELAID) and node.all_input_nodes[0] in owner:
            source = owner[node.all_input_nodes[0]]
            own = node.target in COPIES or (node.target is getitem and given(node).target in COPIES)
            owner[node] = node if own else source
            unit[owner[node]] = unit[source]
        if node in owner:
            last = max((place[user] for user in node.users), default=place[node])
            ends[owner[node]] = max(ends.get(owner[node], 0), last)
    events = sorted(
        [(place[each], 1, each) for each in ends] + [(end + 1, -1, each) for each, end in ends.items()], key=_when
    )
    alive: Counter[str] = Counter()
    held = worst = most = 0
    for _, change, each in events:
        alive[unit[each]] += change
        held += change * _bytes(each)
        worst, most = max(worst, sum(count > 0 for count in alive.values())), max(most, held)
    return Peak(worst, most)


def _when(event: tuple[int, int, Node]) -> tuple[int, int]:
    """Memory that goes does so before more is made."""
    return event[:2]


def _bytes(made: Node) -> int:
    """Bytes of the memory that a node makes."""
    if kind_of(made) == "gather":
        (result,) = made.users
        return nbytes(result)
    return nbytes(made)
