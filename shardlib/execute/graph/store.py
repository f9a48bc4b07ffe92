"""A pass that moves what blocks are computed again from to where `shardlib.remat` keeps it between forward and backward.

Of what `recompute` leaves for backward, that is the inputs of blocks, and of checkpoints that a model makes itself. An input
goes to the host while its block computes, and comes back, or is gathered, while the block after it is computed again.
"""

from __future__ import annotations

import itertools

from torch.fx import Graph, Node

from shardlib.execute.graph.nodes import (
    BACKWARD,
    BLOCK,
    FORWARD,
    GIVEN,
    PHASE,
    REDUCTION,
    call_before,
    fetched,
    given,
    nbytes,
    of_kind,
    positions,
    replace,
    roots_of,
    value_of,
    writes_of,
)
from shardlib.execute.values.keeping import (
    Between,
    Keeping,
    arrived,
    bring,
    keep,
    keeping_of,
    left,
    start_bring,
    start_keep,
)


def store(graph: Graph, between: Between) -> list[Keeping]:
    """Keep inputs of blocks in a store; returns what they go along, which must live as long as the graph."""
    links: list[Keeping] = []
    if between.how is None or between.store is None:
        return links
    wholes, roots, place = fetched(graph), roots_of(graph), positions(graph)
    written = writes_of(roots)
    for node in list(graph.nodes):
        if GIVEN not in node.meta or node in wholes or roots[node] in written or nbytes(node) < between.how.smallest:
            continue
        _, block = node.meta[GIVEN]
        users = sorted((user for user in node.users if user.op != "output"), key=place.__getitem__)
        now = [user for user in users if user.meta.get(PHASE) == FORWARD]
        later = [user for user in users if user not in now]
        if now and later and (block is None or between.how.covers(block)):
            about = "an input of " + ("a checkpoint" if block is None else f"block {block}")
            link = Keeping(between, between.store, about, value_of(node))
            _move(graph, node, now[0], later, link)
            links.append(link)
    return links


def _move(graph: Graph, node: Node, first: Node, later: list[Node], link: Keeping) -> None:
    """Keep what a node makes from its ``first`` use until ``later`` ones."""
    own = {GIVEN: node.meta[GIVEN]}
    with graph.inserting_before(first):
        kept = graph.call_function(keep, (node, link.number))
    kept.meta = own | {PHASE: FORWARD, BLOCK: first.meta.get(BLOCK)}
    if not link.host:
        kept.meta["val"] = link.share
    with graph.inserting_before(later[0]):
        back = graph.call_function(bring, (kept, link.number))
    back.meta = own | {PHASE: later[0].meta.get(PHASE), BLOCK: later[0].meta.get(BLOCK), "val": value_of(node)}
    for user in later:
        user.replace_input_with(node, back)


def move_beside(graph: Graph) -> None:
    """Let what goes to the host go beside what follows, until the inputs of the next block do; and come back one ahead."""
    calls = (node for node in graph.nodes if node.op == "call_function")
    end = next(node for node in graph.nodes if node.op == "output")
    turn = next((node for node in calls if node.meta.get(PHASE) in (BACKWARD, REDUCTION)), end)
    flying: list[tuple[Node, Node]] = []
    for node in of_kind(graph, (keep,)):
        if keeping_of(node.args[1]).host:
            if flying and flying[0][0].meta[GIVEN] != node.meta[GIVEN]:
                _leave(graph, flying, node)
            flying.append((node, call_before(graph, node, start_keep, node.args, node)))
    _leave(graph, flying, turn)
    before = turn.prev
    for _, group in itertools.groupby(of_kind(graph, (bring,)), lambda node: node.meta[GIVEN]):
        first: Node | None = None
        for node in group:
            link = keeping_of(node.args[1])
            started = call_before(graph, node, start_bring, node.args, node)
            started.meta["val"] = link.share if link.late else value_of(node)
            before.append(started)
            before = started
            there = call_before(graph, node, arrived, (started, link.number, given(node)), node)
            there.meta["val"] = value_of(node)
            replace(graph, node, there)
            first = first or there
        before = first or before


def _leave(graph: Graph, flying: list[tuple[Node, Node]], before: Node) -> None:
    """Wait, before a node, until what goes to the host is there."""
    for node, started in flying:
        link = keeping_of(node.args[1])
        started.meta["val"] = link.share
        gone = call_before(graph, before, left, (started, link.number, given(node)), node)
        gone.meta[BLOCK] = None
        replace(graph, node, gone)
    flying.clear()
