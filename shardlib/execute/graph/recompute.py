"""A pass that computes blocks again in backward, as `shardlib.remat` says, in place of keeping what they computed.

What is drawn from torch's own generators is kept, and so are decisions (`shardlib.common.once`) and numbers that the host
reads. The library's draws are made again, from the same seeds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.fx import Graph, Node

from shardlib.common._compat import FUSED_ATTENTIONS, scaled_product
from shardlib.execute.graph.nodes import (
    EXCHANGES,
    changes,
    copied,
    draws,
    fetched,
    memory_of,
    positions,
    value_of,
    writes_of,
)
from shardlib.execute.graph.trace import BACKWARD, BLOCK, DECIDED, FORWARD, PHASE

_aten = torch.ops.aten
# What remat("dots") keeps.
_PRODUCTS = (_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default, scaled_product)
DOTS = {*_PRODUCTS, *FUSED_ATTENTIONS}


def recompute(graph: Graph, keep_dots: bool = False) -> None:
    """Compute the nodes of blocks again where backward uses them; with ``keep_dots`` not products."""
    wholes = fetched(graph)
    drawn: set[Node] = set()  # and what is written to it, as a mask of dropout is divided by what is kept
    for node in graph.nodes:
        if draws(node) or (changes(node) and node.all_input_nodes[0] in drawn):
            drawn.add(node)
    writes = writes_of(graph)
    kept = {made for made, nodes in writes.items() if not drawn.isdisjoint(nodes)}
    read = _read(graph, writes)
    # What is written to has one value if all of it is written in the block before it is read.
    place = positions(graph)
    written = {
        write.meta[BLOCK]
        for made, nodes in writes.items()
        if made not in kept
        for write in nodes
        if any(each.meta[BLOCK] != made.meta[BLOCK] or each.meta[PHASE] != FORWARD for each in nodes)
        or any(place[each] < place[nodes[-1]] for each in read[made])
        or made.op != "call_function"
    }
    again: dict[Node, Node] = {}

    def recomputes(node: Node) -> bool:
        if node.op != "call_function" or node in wholes or node.meta.get(PHASE) != FORWARD:
            return False
        block = node.meta.get(BLOCK)
        if block is None or block in written or node in drawn or node.target in EXCHANGES:
            return False
        if any(user.meta.get(PHASE) == FORWARD and user.meta.get(BLOCK) != block for user in node.users):
            return False  # what a block hands on is there for the next one
        made = memory_of(node)
        if made in kept or (made is not node and made in writes and not recomputes(made)):
            return False
        if node.meta.get(DECIDED) or not isinstance(value_of(node), torch.Tensor | list | tuple):
            return False
        return not (keep_dots and node.target in DOTS)

    def computed(node: Node, at: Node) -> Node:
        if not recomputes(node):
            return node
        if node not in again:
            for each in node.all_input_nodes:
                if each.meta.get(BLOCK) == node.meta[BLOCK]:
                    computed(each, at)
        if node not in again:  # as it is, if it writes to what was computed now
            with graph.inserting_before(at):
                made = copied(node, again, graph)
            made.meta = node.meta | {PHASE: BACKWARD}
            for each in writes.get(node, ()):
                computed(each, at)
        return again[node]

    for node in list(graph.nodes):
        if node.meta.get(PHASE) == BACKWARD and node not in wholes:
            for each in node.all_input_nodes:
                node.replace_input_with(each, computed(each, node))


def _read(graph: Graph, writes: Mapping[Node, Sequence[Node]]) -> dict[Node, list[Node]]:
    """The nodes that read what is written to, but for those that write to it or give views of it."""
    found: dict[Node, list[Node]] = {made: [] for made in writes}
    for node in graph.nodes:
        for each in node.all_input_nodes:
            if (made := memory_of(each)) in writes and memory_of(node) is not made:
                found[made].append(node)
    return found
