"""A pass that drops what changes nothing: views of the same shape, detaching, and nodes that nothing uses.

A dead view of a gathered parameter would keep all of it.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from shardlib.execute.graph.nodes import changes, given, value_of

_aten = torch.ops.aten
_DETACHING = (_aten.detach.default, _aten.alias.default)
_SHAPING = (_aten.view.default, _aten.expand.default, _aten.reshape.default)


def clean(graph: Graph) -> None:
    """Drop no-ops and dead code."""
    for node in list(graph.nodes):
        if node.op == "call_function" and _same(node):
            node.replace_all_uses_with(given(node))
            graph.erase_node(node)
    for node in reversed(list(graph.nodes)):
        if node.op in ("call_function", "get_attr") and not node.users and not changes(node):
            graph.erase_node(node)


def _same(node: Node) -> bool:
    """Whether a node's result is its input."""
    if node.target in _DETACHING:
        return True
    if node.target not in _SHAPING:
        return False
    before, after = value_of(given(node)), value_of(node)
    return before is not None and before.shape == after.shape and before.stride() == after.stride()
