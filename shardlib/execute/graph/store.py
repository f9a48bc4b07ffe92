"""A pass that moves what blocks are computed again from to where `shardlib.remat` keeps it between forward and backward.

Of what `recompute` leaves for backward, that is the inputs of blocks, and of checkpoints that a model makes itself.
"""

from __future__ import annotations

from torch.fx import Graph, Node

from shardlib.execute.graph.nodes import changes, fetched, nbytes, positions, roots_of, value_of
from shardlib.execute.graph.trace import BLOCK, FORWARD, GIVEN, PHASE
from shardlib.execute.values.keeping import Between, Keeping, bring, keep


def store(graph: Graph, between: Between) -> list[Keeping]:
    """Keep inputs of blocks in a store; returns what they go along, which must live as long as the graph."""
    links: list[Keeping] = []
    if between.how is None or between.store is None:
        return links
    wholes, roots, place = fetched(graph), roots_of(graph), positions(graph)
    written = {roots[each] for node in graph.nodes for each in changes(node)}
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
