"""A pass that merges neighbouring small messages: gathers in the order in which units are used, reductions as they come.

A message of a few kilobytes takes as long as its latency.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from shardlib.collectives.buffers import GATHER, SCATTER, SUM, AxisLink
from shardlib.common.thresholds import Threshold
from shardlib.execute.graph.nodes import (
    GATHERS,
    REDUCTIONS,
    fetched,
    given,
    link_at,
    marks_of,
    nbytes,
    of_kind,
    positions,
    result_of,
    value_of,
)

_aten = torch.ops.aten
SMALLEST, LARGEST = Threshold(1 << 16), Threshold(1 << 20)  # bytes up to which messages are merged, by the largest unit


def limit_of(graph: Graph) -> int:
    """Bytes up to which messages are merged: as large as a unit, so that no more is in memory than without."""
    largest = max((nbytes(result_of(node)) for node in of_kind(graph, (GATHER,))), default=0)
    return max(SMALLEST(), min(largest, LARGEST()))


def merge(graph: Graph) -> list[AxisLink]:
    """Merge small messages; returns the links of the merged ones, which must live as long as the graph."""
    links, limit = [], limit_of(graph)
    for group in _groups(_gathers(graph), limit):
        links.append(_merged_gather(graph, group))
    for kind in (SCATTER, SUM):
        for group in _groups(_reductions(graph, kind), limit):
            links.append(_merged_reduction(graph, group))
    return links


def _groups(exchanges: Iterable[Node], limit: int) -> list[list[Node]]:
    """Runs of two and more neighbours along one axis and of one dtype, that all stay or none, of ``limit`` bytes together."""
    groups: list[list[Node]] = []
    size, last = 0, None
    for node in exchanges:
        link = link_at(node)
        own = nbytes(result_of(node)) * (link.ways if node.target is SCATTER else 1)
        form = link.mesh, link.axis, link.stays, value_of(given(node)).dtype
        if groups and form == last and size + own <= limit:
            groups[-1].append(node)
            size += own
        else:
            groups.append([node])
            size, last = own, form
    return [group for group in groups if len(group) > 1]


def _gathers(graph: Graph) -> list[Node]:
    """Gathers of stored parameters over one axis, in the order of their first use."""
    wholes, found = fetched(graph), dict[Node, None]()
    sources: dict[Node, Node] = {}
    for node in graph.nodes:
        if node in wholes:
            sources[node] = node if node.target in GATHERS else sources[node.all_input_nodes[0]]
            continue
        for each in node.all_input_nodes:
            if each in wholes:
                found[sources[each]] = None
    return [
        node for node in found if node.target is GATHER and given(node).op == "placeholder" and not link_at(node).tile
    ]


def _reductions(graph: Graph, kind: Any) -> list[Node]:
    """Reductions whose input and result are in no other exchange, and whose results nothing uses before the end."""
    found = []
    for node in of_kind(graph, (kind,)):
        source, users = given(node), result_of(node).users
        chained = source.target is operator.getitem and given(source).target in REDUCTIONS
        if not chained and not link_at(node).tile and all(user.op == "output" for user in users):
            found.append(node)
    return found


def _merged_link(group: Sequence[Node]) -> AxisLink:
    first = link_at(group[0])
    return AxisLink(first.mesh, first.axis, f"{first.label} and {len(group) - 1} more", first.stays)


def _merged_gather(graph: Graph, group: Sequence[Node]) -> AxisLink:
    link = _merged_link(group)
    place = positions(graph)
    sizes = [value_of(given(node)).numel() for node in group]
    with graph.inserting_before(min(group, key=place.__getitem__)):
        shards = _call(graph, _aten.cat.default, [given(node) for node in group])
        gathered = _call(graph, GATHER, shards, link.number)
        whole = _call(graph, operator.getitem, gathered, 0)
        rows = _call(graph, _aten.view.default, whole, [link.ways, -1])
        parts = _call(graph, _aten.split_with_sizes.default, rows, sizes, 1)
        own = [_call(graph, operator.getitem, parts, number) for number in range(len(group))]
    for node, part in zip(group, own, strict=True):
        flat = result_of(node)
        for user in list(flat.users):
            if user.target is _aten.view.default and _sizes(user) in (
                [link.ways, -1],
                list(value_of(part).shape),
            ):
                user.replace_all_uses_with(part)
                graph.erase_node(user)
        if flat.users:
            with graph.inserting_before(flat):
                dense = _call(graph, _aten.clone.default, part)
                dense.kwargs = {"memory_format": torch.contiguous_format}
                dense.meta["val"] = value_of(part).contiguous()
                flat.replace_all_uses_with(_call(graph, _aten.view.default, dense, [-1]))
        graph.erase_node(flat)
        graph.erase_node(node)
    return link


def _merged_reduction(graph: Graph, group: Sequence[Node]) -> AxisLink:
    link, last, scatters = _merged_link(group), group[-1], group[0].target is SCATTER
    sizes = [value_of(result_of(node)).numel() for node in group]
    with graph.inserting_after(result_of(last)):
        anchor = graph.call_function(operator.getitem, (last, 0))  # a place after all of their inputs
    with graph.inserting_before(anchor):
        inputs = [given(node) for node in group]
        if scatters:
            rows = [_call(graph, _aten.view.default, each, [link.ways, -1]) for each in inputs]
            whole = _call(graph, _aten.view.default, _call(graph, _aten.cat.default, rows, 1), [-1])
        else:
            whole = _call(graph, _aten.cat.default, inputs)
        exchanged = _call(graph, group[0].target, whole, link.number)
        parts = _call(graph, _aten.split_with_sizes.default, _call(graph, operator.getitem, exchanged, 0), sizes)
        own = [_call(graph, operator.getitem, parts, number) for number in range(len(group))]
    graph.erase_node(anchor)
    for node, part in zip(group, own, strict=True):
        flat = result_of(node)
        flat.replace_all_uses_with(part)
        graph.erase_node(flat)
        graph.erase_node(node)
    return link


def _sizes(view: Node) -> list[Any]:
    sizes: Any = view.args[1]
    return list(sizes)


def _call(graph: Graph, target: Any, *args: Any) -> Node:
    """A call, with what it makes noted as a trace notes it, and the phase of its first input."""
    node = graph.call_function(target, args)
    values = torch.fx.node.map_arg(args, value_of)
    node.meta = marks_of(node.all_input_nodes[0]) | {"val": target(*values)}
    return node
