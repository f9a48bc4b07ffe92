"""A pass that packs and reduces each gradient as soon as it is complete.

Autograd runs a unit's gather last in backward, since it is first in forward: in a trace all reductions are at the end, and
all whole gradients live until then.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from shardlib.common._compat import chunk_cat_operator
from shardlib.execute.graph.nodes import (
    BACKWARD,
    FORWARD,
    PHASE,
    REDUCTIONS,
    RELAID,
    of_kind,
    positions,
    roots_of,
    writes_of,
)

_aten = torch.ops.aten
_PACKING = RELAID | {
    *(_aten.cat.default, chunk_cat_operator, _aten.constant_pad_nd.default, _aten.zeros.default, _aten.add.Tensor)
}


def hoist(graph: Graph) -> None:
    """Move reductions, and what packs gradients, to where their inputs are complete."""
    moved: set[Node] = set()
    for exchange in of_kind(graph, REDUCTIONS):
        moved |= {*exchange.users} | _packing(exchange)
    output = next(iter(reversed(graph.nodes)))
    for result in output.all_input_nodes:
        if result.target in _PACKING and result.meta.get(PHASE) == BACKWARD:
            moved |= _packing(result)
    roots = roots_of(graph)
    writes = writes_of(roots)
    # A moved node has the place of the node behind which it stands, and its number among those that do.
    place = {node: (number, 0) for node, number in positions(graph).items()}
    behind: dict[int, Node] = {}
    for count, node in enumerate([node for node in graph.nodes if node in moved], 1):
        # What is written to is not to be read before.
        written = (write for each in node.all_input_nodes for write in writes.get(roots[each], ()))
        before = (write for write in written if place[write] < place[node])
        last = max((*node.all_input_nodes, *before), key=place.__getitem__, default=node)
        if last is not node and last.op != "placeholder" and last.meta.get(PHASE) != FORWARD:
            number = place[last][0]
            behind.get(number, last).append(node)
            behind[number], place[node] = node, (number, count)


def _packing(node: Node) -> set[Node]:
    """An exchange, and the nodes before it that lay out what it is given, and nothing else."""
    found, todo = set(), [node]
    while todo:
        each = todo.pop()
        found.add(each)
        todo += [one for one in each.all_input_nodes if one.target in _PACKING and set(one.users) <= found]
    return found
