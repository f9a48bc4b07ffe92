"""A pass that drops what changes nothing: views of the same shape, detaching, and nodes that nothing uses and that neither
write, nor check, nor draw from torch's own generators.

A dead view of a gathered parameter would keep all of it.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from shardlib.execute.graph.nodes import GIVEN, NAMES, given, value_of

_aten = torch.ops.aten
_DETACHING = (_aten.detach.default, _aten.alias.default)
_SHAPING = (_aten.view.default, _aten.expand.default, _aten.reshape.default)


def clean(graph: Graph) -> None:
    """Drop no-ops and dead code."""
    for node in list(graph.nodes):
        if node.op == "call_function" and _same(node):
            source = given(node)
            source.meta[NAMES] = (*source.meta.get(NAMES, ()), *node.meta.get(NAMES, ()))
            if GIVEN in node.meta:
                source.meta.setdefault(GIVEN, node.meta[GIVEN])
            node.replace_all_uses_with(source)
            graph.erase_node(node)
    for node in reversed(list(graph.nodes)):
        if node.op in ("call_function", "get_attr") and not node.users and not node.is_impure():
            graph.erase_node(node)


def _same(node: Node) -> bool:
    """Whether a node's result is its input."""
    if node.target in _DETACHING:
        return True
    if node.target not in _SHAPING:
        return False
    before, after = value_of(given(node)), value_of(node)
    return before is not None and _layout(before) == _layout(after)


def _layout(value: torch.Tensor) -> list[str]:
    """Sizes and strides, as text: of sizes that are known in a run alone, it cannot be asked whether they are equal."""
    return [*map(str, (*value.shape, *value.stride()))]
