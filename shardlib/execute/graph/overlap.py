"""A pass that starts exchanges before they are needed, in an order that is the same on all ranks.

A unit's gathers start when the unit before it arrives, and run while that one is computed with. A reduction starts where its
gradient is complete, and the graph waits for it when another one starts, or at the end. What is in a store comes and goes
beside other work too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node

from shardlib.collectives.buffers import STARTS, PendingExchange
from shardlib.execute.graph.nodes import (
    GATHERS,
    REDUCTIONS,
    RELAID,
    call_before,
    from_shards,
    given,
    link_at,
    of_kind,
    positions,
    replace,
)
from shardlib.execute.graph.store import move_beside
from shardlib.execute.values.wholes import FETCH, REDUCE, Fetching, Reducing, announce, start_fetch, start_reduce
from shardlib.mesh.memories import AHEAD
from shardlib.sharded.gather import Gather

IN_FLIGHT = 2  # reductions that may be under way
_STARTS: dict[Any, Callable[..., Any]] = STARTS | {FETCH: start_fetch, REDUCE: start_reduce}


def wait(sent: PendingExchange | Gather | Reducing) -> list[torch.Tensor]:
    """What an exchange gave."""
    found = sent.wait()
    return found if isinstance(found, list) else [found]


def overlap(graph: Graph) -> None:
    """Start each exchange before it is waited for."""
    move_beside(graph)
    units = _by_unit(graph)
    place = positions(graph)
    ends = [_last_use(unit, place) for unit in units]
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
            if before is not None and (place[source] <= place[before] or from_shards(source)):
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
    for node in of_kind(graph, REDUCTIONS):
        if len(flying) == IN_FLIGHT:
            _land(graph, *flying.pop(0), before=node)
        started = _started(graph, node)
        if link_at(node).tile:  # whose gradient must not be there beside the next tile's
            _waited(graph, node, started)
        else:
            flying.append((node, started))
    end = next(node for node in graph.nodes if node.op == "output")
    for node, started in flying:
        _land(graph, node, started, before=end)
    _announce(graph)


def _by_unit(graph: Graph) -> list[list[Node]]:
    """The gathers, those of one unit that follow each other together."""
    return [list(nodes) for _, nodes in itertools.groupby(of_kind(graph, GATHERS), lambda node: link_at(node).label)]


def _last_use(unit: list[Node], place: dict[Node, int]) -> Node:
    """The last node that reads what gathers of a unit gave."""
    last, todo = unit[0], [node for node in unit if not link_at(node).stays]
    while todo:
        node = todo.pop()
        last = max(last, node, key=place.__getitem__)
        if node in unit or node.target in RELAID:
            todo += node.users
    return last


def _started(graph: Graph, node: Node) -> Node:
    return call_before(graph, node, _STARTS[node.target], node.args, node)


def _waited(graph: Graph, node: Node, started: Node) -> Node:
    """The wait in the place of an exchange."""
    waited = call_before(graph, node, wait, (started,), node)
    replace(graph, node, waited)
    return waited


def _land(graph: Graph, node: Node, started: Node, before: Node) -> None:
    """Wait for a reduction where its result is first used, or before a node, whichever is earlier."""
    waited = _waited(graph, node, started)
    results = list(waited.users)
    users, place = {user for result in results for user in result.users}, before
    following = waited
    while following is not before:
        following = following.next
        if following in users:
            place = following
            break
    for each in (waited, *results):
        place.prepend(each)


def _announce(graph: Graph) -> None:
    """Announce what is read from disk a few reads ahead."""
    reads = [
        node for node in of_kind(graph, (start_fetch,)) if isinstance(way := link_at(node), Fetching) and way.announced
    ]
    for number, node in enumerate(reads):
        if following := tuple(given(each) for each in reads[number + 1 : number + 1 + AHEAD]):
            with graph.inserting_before(node):
                graph.call_function(announce, following)
