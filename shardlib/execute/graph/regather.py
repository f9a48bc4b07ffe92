"""A pass that gathers each unit where it is used, again in backward, so that two units are whole at a time.

A trace gathers all units before the first block, and backward uses what forward gathered. Here each use reads the unit's
latest gather if at most one other unit was used since, and otherwise a gather of its own, together with the views and casts
that it needs. Of tiles one is whole, beside the units. What keeps a unit in memory is its last use. What stays from forward
to backward, a second shard or a unit that the plan keeps, is gathered at the first use.

Where backward does not follow on forward, as in a pipeline, it reads nothing else of what forward gathered.
"""

from __future__ import annotations

from collections import OrderedDict

from torch.fx import Graph, Node

from shardlib.execute.graph.nodes import BACKWARD, BLOCK, GATHERS, PHASE, fetched, link_at, staying

WINDOW = 2  # units whose gathers later uses may read


def regather(graph: Graph, apart: bool = False) -> None:
    """Gather units where they are used. ``apart``: backward does not follow on forward."""
    units, stay = fetched(graph), staying(graph)
    tiles = {units[node] for node in units if node.target in GATHERS and link_at(node).tile}
    passing = {units[node] for node in units if node.target in GATHERS and not link_at(node).stays}
    kept: dict[Node, Node] = {}  # of what stays
    latest: OrderedDict[str, dict[Node, Node]] = OrderedDict()
    tile: OrderedDict[str, dict[Node, Node]] = OrderedDict()  # which is whole beside them
    moved: set[Node] = set()  # to their first use

    def found(node: Node, known: dict[Node, Node]) -> Node:
        return known.get(node, kept.get(node, node))

    def gathered(node: Node, at: Node, known: dict[Node, Node]) -> Node:
        if node in stay:
            known = kept
        if node not in known:
            for each in node.all_input_nodes:
                if each in units:
                    gathered(each, at, known)
            if node in moved or any(found(each, known) is not each for each in node.all_input_nodes):
                with graph.inserting_before(at):
                    made = graph.node_copy(node, lambda each: found(each, known))
            else:
                at.prepend(node)
                moved.add(node)
                made = node
            known[node] = made
            made.meta = node.meta | {PHASE: at.meta.get(PHASE), BLOCK: at.meta.get(BLOCK)}
        return known[node]

    forward = True
    for node in list(graph.nodes):
        if node in units:
            continue
        if apart and forward and node.meta.get(PHASE) == BACKWARD:
            latest.clear()
            tile.clear()
            forward = False
        for whole in [each for each in node.all_input_nodes if each in units]:
            unit = units[whole]
            window, most = (tile, 1) if unit in tiles else (latest, WINDOW)
            if unit in passing:
                window.setdefault(unit, {})
                window.move_to_end(unit)
                if len(window) > most:
                    window.popitem(last=False)
            node.replace_input_with(whole, gathered(whole, node, window.get(unit, kept)))
    for node in reversed(units):
        if not node.users:
            graph.erase_node(node)
