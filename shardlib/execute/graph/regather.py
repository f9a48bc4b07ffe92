"""A pass that gathers each unit where it is used, again in backward, so that two units are whole at a time.

A trace gathers all units before the first block, and backward uses what forward gathered. Here each use reads the unit's
latest gather if at most one other unit was used since, or the plan keeps the unit until backward; otherwise a gather of
its own, together with the views and casts that it needs. What keeps a unit in memory is its last use.
"""

from __future__ import annotations

from collections import OrderedDict

from torch.fx import Graph, Node

from shardlib.collectives.buffers import GATHER
from shardlib.execute.graph.nodes import copied, fetched, link_at, of_kind
from shardlib.execute.graph.trace import BLOCK, PHASE

WINDOW = 2  # units whose gathers later uses may read


def regather(graph: Graph) -> None:
    """Gather units where they are used."""
    units = fetched(graph)
    stays = {link_at(node).label: dict[Node, Node]() for node in of_kind(graph, (GATHER,)) if link_at(node).kept}
    latest: OrderedDict[str, dict[Node, Node]] = OrderedDict()
    moved: set[Node] = set()  # to their first use

    def gathered(node: Node, at: Node, known: dict[Node, Node]) -> Node:
        if node not in known:
            for each in node.all_input_nodes:
                if each in units:
                    gathered(each, at, known)
            if node in moved or any(known.get(each, each) is not each for each in node.all_input_nodes):
                with graph.inserting_before(at):
                    made = copied(node, known, graph)
            else:
                at.prepend(node)
                moved.add(node)
                made = known[node] = node
            made.meta = node.meta | {PHASE: at.meta.get(PHASE), BLOCK: at.meta.get(BLOCK)}
        return known[node]

    for node in list(graph.nodes):
        if node in units:
            continue
        for whole in [each for each in node.all_input_nodes if each in units]:
            unit = units[whole]
            known = stays.get(unit)
            if known is None:
                known = latest.setdefault(unit, {})
                latest.move_to_end(unit)
                if len(latest) > WINDOW:
                    latest.popitem(last=False)
            node.replace_input_with(whole, gathered(whole, node, known))
    for node in reversed(units):
        if not node.users:
            graph.erase_node(node)
