"""A pass that starts exchanges before they are needed, in an order that is the same on all ranks.

A unit's gathers start when the unit before it arrives, and run while that one is computed with. A reduction starts where its
gradient is complete, and the graph waits for it when another one starts, or at the end.
"""

from __future__ import annotations

import itertools

import torch
from torch.fx import Graph, Node

from shardlib.collectives.buffers import GATHER, SCATTER, STARTS, SUM, Sent
from shardlib.execute.graph.nodes import RELAID, from_shards, given, link_at, of_kind, positions, result_of

IN_FLIGHT = 2  # reductions that may be under way


def wait(sent: Sent) -> torch.Tensor:
    """What an exchange gave."""
    return sent.wait()


def overlap(graph: Graph) -> None:
    """Start each exchange before it is waited for."""
    units = _by_unit(graph)
    place = positions(graph)
    # What stays for backward waits for nothing: as if it ended where it begins.
    ends = [unit[0] if link_at(unit[0]).kept else _last_use(unit, place) for unit in units]
    before: Node | None = None  # where the first gather of the unit before has arrived
    for number, unit in enumerate(units):
        if before is not None:  # a third unit must not be there
            older = [end for end in ends[: max(number - 1, 0)] if place[end] > place[before]]
            before = max((before, *older), key=place.__getitem__)
            if place[before] >= place[unit[0]]:
                before = None
        first: Node | None = None
        for node in unit:
            source, started = given(node), _started(graph, node)
            place[started] = place[node]
            if before is not None and from_shards(source):
                moved = [source, started] if place[source] > place[before] else [started]
                for each in moved:
                    before.append(each)
                    place[each] = place[before]
                    before = each
            waited = _waited(graph, node, started)
            place[waited] = place[node]
            first = waited if first is None else first
        before = first
    flying: list[tuple[Node, Node]] = []
    for node in of_kind(graph, (SCATTER, SUM)):
        if len(flying) == IN_FLIGHT:
            _land(graph, *flying.pop(0), before=node)
        started = _started(graph, node)
        flying.append((node, started))
    end = next(node for node in graph.nodes if node.op == "output")
    for node, started in flying:
        _land(graph, node, started, before=end)


def _by_unit(graph: Graph) -> list[list[Node]]:
    """The gathers, those of one unit that follow each other together."""
    return [list(nodes) for _, nodes in itertools.groupby(of_kind(graph, (GATHER,)), lambda node: link_at(node).label)]


def _last_use(unit: list[Node], place: dict[Node, int]) -> Node:
    """The last node that reads what gathers of a unit gave."""
    last, todo = unit[0], list(unit)
    while todo:
        node = todo.pop()
        last = max(last, node, key=place.__getitem__)
        if node in unit or node.target in RELAID:
            todo += node.users
    return last


def _started(graph: Graph, node: Node) -> Node:
    with graph.inserting_before(node):
        started = graph.call_function(STARTS[node.target], node.args)  # type: ignore[index]
    started.meta = {key: value for key, value in node.meta.items() if key not in ("val", "tensor_meta")}
    return started


def _waited(graph: Graph, node: Node, started: Node) -> Node:
    """The wait in the place of an exchange's result."""
    flat = result_of(node)
    with graph.inserting_before(flat):
        waited = graph.call_function(wait, (started,))
    waited.meta = dict(flat.meta)
    flat.replace_all_uses_with(waited)
    graph.erase_node(flat)
    graph.erase_node(node)
    return waited


def _land(graph: Graph, node: Node, started: Node, before: Node) -> None:
    """Wait for a reduction where its result is first used, or before a node, whichever is earlier."""
    waited = _waited(graph, node, started)
    users, place = set(waited.users), before
    following = waited
    while following is not before:
        following = following.next
        if following in users:
            place = following
            break
    place.prepend(waited)
