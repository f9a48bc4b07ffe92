"""A pass that starts exchanges before they are needed, in an order that is the same on all ranks.

A unit's gathers start when the unit before it arrives, and run while that one is computed with. A reduction starts where its
gradient is complete, and the graph waits for it when another one starts, or at the end. An input of a block goes to the
host while its block computes, and comes back, or is gathered, while the block after it is computed again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node

from shardlib.collectives.buffers import STARTS, Sent
from shardlib.execute.graph.nodes import (
    GATHERS,
    REDUCTIONS,
    RELAID,
    from_shards,
    given,
    link_at,
    of_kind,
    positions,
    value_of,
)
from shardlib.execute.graph.trace import BACKWARD, BLOCK, GIVEN, PHASE, REDUCTION
from shardlib.execute.values.keeping import arrived, bring, keep, keeping_of, left, start_bring, start_keep
from shardlib.execute.values.routes import FETCH, REDUCE, Fetching, Reducing, announce, start_fetch, start_reduce
from shardlib.mesh.memories import AHEAD
from shardlib.sharded.gather import Gather

IN_FLIGHT = 2  # reductions that may be under way
_STARTS: dict[Any, Callable[..., Any]] = STARTS | {FETCH: start_fetch, REDUCE: start_reduce}


def wait(sent: Sent | Gather | Reducing) -> list[torch.Tensor]:
    """What an exchange gave."""
    found = sent.wait()
    return found if isinstance(found, list) else [found]


def overlap(graph: Graph) -> None:
    """Start each exchange before it is waited for."""
    _move(graph)
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


def _move(graph: Graph) -> None:
    """Let what goes to the host go beside what follows, until the inputs of the next block do; and come back one ahead."""
    calls = (node for node in graph.nodes if node.op == "call_function")
    end = next(node for node in graph.nodes if node.op == "output")
    turn = next((node for node in calls if node.meta.get(PHASE) in (BACKWARD, REDUCTION)), end)
    flying: list[tuple[Node, Node]] = []
    for node in of_kind(graph, (keep,)):
        if keeping_of(node.args[1]).host:
            if flying and flying[0][0].meta[GIVEN] != node.meta[GIVEN]:
                _leave(graph, flying, node)
            flying.append((node, _begun(graph, node, start_keep)))
    _leave(graph, flying, turn)
    before = turn.prev
    for _, group in itertools.groupby(of_kind(graph, (bring,)), lambda node: node.meta[GIVEN]):
        first: Node | None = None
        for node in group:
            link = keeping_of(node.args[1])
            started = _begun(graph, node, start_bring)
            started.meta["val"] = link.share if link.late else value_of(node)
            before.append(started)
            before = started
            with graph.inserting_before(node):
                there = graph.call_function(arrived, (started, link.number, given(node)))
            there.meta = dict(node.meta)
            node.replace_all_uses_with(there)
            graph.erase_node(node)
            first = first or there
        before = first or before


def _begun(graph: Graph, node: Node, start: Callable[..., Any]) -> Node:
    """The start of what a node does, in front of it."""
    with graph.inserting_before(node):
        started = graph.call_function(start, node.args)
    started.meta = dict(node.meta)
    return started


def _leave(graph: Graph, flying: list[tuple[Node, Node]], before: Node) -> None:
    """Wait, before a node, until what goes to the host is there."""
    for node, started in flying:
        link = keeping_of(node.args[1])
        started.meta["val"] = link.share
        with graph.inserting_before(before):
            gone = graph.call_function(left, (started, link.number, given(node)))
        gone.meta = {**node.meta, BLOCK: None}
        node.replace_all_uses_with(gone)
        graph.erase_node(node)
    flying.clear()


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
    with graph.inserting_before(node):
        started = graph.call_function(_STARTS[node.target], node.args)
    started.meta = {key: value for key, value in node.meta.items() if key not in ("val", "tensor_meta")}
    return started


def _waited(graph: Graph, node: Node, started: Node) -> Node:
    """The wait in the place of an exchange."""
    with graph.inserting_before(node):
        waited = graph.call_function(wait, (started,))
    waited.meta = dict(started.meta)
    node.replace_all_uses_with(waited)
    graph.erase_node(node)
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
