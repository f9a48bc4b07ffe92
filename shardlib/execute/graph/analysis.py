"""What a graph holds and exchanges, from its nodes alone: bytes at each, gathered units at a time, all of it as text."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from operator import getitem
from typing import Any, NamedTuple

from torch.fx import Graph, Node

from shardlib.collectives.buffers import GATHER, SCATTER, SUM, start_gather, start_scatter, start_sum
from shardlib.collectives.ops import STARTS
from shardlib.execute.graph.fuse import Inductor
from shardlib.execute.graph.nodes import (
    BACKWARD,
    BLOCK,
    FORWARD,
    PHASE,
    REDUCTION,
    RELAID,
    given,
    lies_in,
    link_at,
    nbytes,
    positions,
    sent,
    value_of,
)
from shardlib.execute.graph.overlap import wait
from shardlib.execute.values.keeping import arrived, bring, keep, keeping_of, start_bring, start_keep
from shardlib.execute.values.wholes import FETCH, REDUCE, start_fetch, start_reduce

_KINDS: dict[Any, str] = {
    GATHER: "gather", start_gather: "gather", SCATTER: "reduce-scatter", start_scatter: "reduce-scatter",
    SUM: "all-reduce", start_sum: "all-reduce", FETCH: "gather", start_fetch: "gather",
    REDUCE: "compressed sum", start_reduce: "compressed sum",
}  # fmt: skip


def kind_of(node: Node) -> str:
    """What a node exchanges: "gather", "reduce-scatter", "all-reduce" or "compressed sum"; "" for other nodes."""
    return _KINDS.get(node.target, "") if node.op == "call_function" else ""


def exchanges(graph: Graph) -> list[Node]:
    """The nodes that exchange, in order."""
    return [node for node in graph.nodes if kind_of(node)]


def order_of(graph: Graph) -> list[tuple[str, str, str, int]]:
    """The exchanges in the order in which they start: kind, label, axis and elements that are given. Equal on all ranks."""
    found = []
    for node in exchanges(graph):
        link = link_at(node)
        elements = sum(value_of(buffer).numel() for buffer in sent(node))
        found.append((kind_of(node), link.label, link.axis, elements))
    return found


@dataclass(frozen=True)
class GraphPeak:
    """The most that a graph holds of gathered parameters at a time.

    Attributes:
        units: the units.
        bytes: of whole leaves, and of buffers that are being gathered.
    """

    units: int
    bytes: int


class Allocation(NamedTuple):
    """Allocation that a graph makes.

    Attributes:
        begins, ends: the numbers of the nodes that make it and that use it last, among all of the graph's.
        bytes: its size.
        unit: whose gathered parameters are in it; "" for any other.
    """

    begins: int
    ends: int
    bytes: int
    unit: str


def allocations(graph: Graph) -> list[Allocation]:
    """The memory that the graph makes, if each piece goes with the last use of what lies in it. Inputs are not counted."""
    place = positions(graph)
    owner: dict[Node, Node] = {}  # a node whose result lies in memory that the graph makes -> the node that made it
    ends, units = dict[Node, int](), dict[Node, str]()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        source = _lies_in(node)
        if kind_of(node) == "gather":
            units[node] = "" if link_at(node).stays and _goes_on(node) else link_at(node).label
        elif node.target in RELAID or node.target is wait:  # a copy or a cast of gathered parameters is one too
            units[node] = units.get(given(node), "")
        if source is not None and source not in owner:
            continue  # in an input
        owner[node] = made = node if source is None else owner[source]
        ends[made] = max(ends.get(made, place[made]), *(place[user] for user in node.users), place[node])
    return [
        # An operator with several results makes all of them before any is taken.
        Allocation(place[given(made) if made.target is getitem else made], end, _bytes(made), units.get(made, ""))
        for made, end in ends.items()
    ]


def _goes_on(node: Node) -> bool:
    """Whether what a node gives is gathered further, as a second shard is."""
    through = (user for user in node.users if user.target in (getitem, wait))
    return any(kind_of(user) == "gather" for user in node.users) or any(map(_goes_on, through))


def _lies_in(node: Node) -> Node | None:
    """The node in whose memory a node's result lies, which may have started what it waits for."""
    if node.target is arrived:
        return None if keeping_of(node.args[1]).late else given(node)
    waits = node.target is wait or (node.target is getitem and given(node).target is wait)
    return given(node) if waits else lies_in(node)


def _bytes(made: Node) -> int:
    """Bytes of the memory that a node makes."""
    if kind_of(made):
        (first, *_) = made.users
        return sum(map(nbytes, (first if first.target is wait else made).users))
    return nbytes(made)


def alive(graph: Graph) -> list[tuple[int, int]]:
    """Bytes that are alive at each node: of gathered parameters, and of all other memory that the graph makes."""
    held = [[0, 0] for _ in range(len(graph.nodes) + 1)]
    for begins, end, size, unit in allocations(graph):
        held[begins][not unit] += size
        held[end + 1][not unit] -= size
    wholes, others = (itertools.accumulate(changes) for changes in zip(*held[:-1]))
    return list(zip(wholes, others))


def peak_of_wholes(graph: Graph) -> GraphPeak:
    """What a graph holds of gathered parameters at the worst place."""
    wholes = [each for each in allocations(graph) if each.unit]
    changes = [(each.ends + 1, -1, each.unit, each.bytes) for each in wholes]  # what ends goes before what begins
    changes += [(each.begins, 1, each.unit, each.bytes) for each in wholes]
    held, size, peak = Counter[str](), 0, GraphPeak(0, 0)
    for _, sign, unit, count in sorted(changes):
        held[unit] += sign
        size += sign * count
        peak = GraphPeak(max(peak.units, sum(each > 0 for each in held.values())), max(peak.bytes, size))
    return peak


_MOVES = {keep: "kept", start_keep: "kept", bring: "again whole", start_bring: "again whole"}


def described(graphs: Mapping[str, Graph], traceable: bool, inductor: Inductor | None) -> str:
    """All graphs of a step, by name, or why there is none."""
    if not traceable:
        return "no graph: the loss function cannot be traced, and runs as without compile=True"
    if not graphs:
        return "no graph yet: take a step"
    compiled = [] if inductor is None else [str(inductor)]
    return "\n\n".join([*itertools.starmap(_described, graphs.items()), *compiled])


def _gathers(node: Node) -> bool:
    """Whether a node gathers an input of a block of the ranks' shares."""
    return node.target in (bring, start_bring) and bool(keeping_of(node.args[1]).axis)


def _described(name: str, graph: Graph) -> str:
    """The graph's nodes by phase and block, its exchanges in order, and what it holds of gathered parameters."""
    calls = [node for node in graph.nodes if node.op == "call_function"]
    of_activations = sum(node.target in STARTS or _gathers(node) for node in calls)
    lines = [f"{name}: {len(calls)} nodes, {len(exchanges(graph)) + of_activations} exchanges"]
    for phase in (FORWARD, BACKWARD, REDUCTION):
        members = [node for node in calls if node.meta.get(PHASE) == phase]
        if not members:
            continue
        made = sum(map(nbytes, members))
        lines.append(f"{phase}: {len(members)} nodes, which make {made:,} bytes")
        blocks = Counter(node.meta.get(BLOCK) for node in members)
        named = [f"block {block}: {count}" for block, count in blocks.items() if block is not None]
        if named:
            lines.append("  " + ", ".join(named))
        for node in members:
            if kind := kind_of(node):
                link, size = link_at(node), sum(map(nbytes, sent(node)))
                way = f"over {link.axis!r}" if link.axis else "from another memory"
                lines.append(f"  {kind} {way} of {size:,} bytes: {link.label}")
            elif node.target in _MOVES:
                lines.append(f"  {_MOVES[node.target]} {keeping_of(node.args[1])}")
            elif node.target in STARTS:
                given, _, _, axis, _, about = node.args
                lines.append(f"  {STARTS[node.target]} over {axis!r} of {nbytes(given):,} bytes: {about}")
    peak = peak_of_wholes(graph)
    if peak.units:
        lines.append(f"gathered at a time: {peak.units} units at most, {peak.bytes:,} bytes")
    return "\n".join(lines)
