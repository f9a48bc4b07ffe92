"""A step's graphs as text: nodes and messages, by phase and unit, with bytes."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping

from torch.fx import Graph, Node

from shardlib.collectives.ops import STARTS
from shardlib.execute.graph.alive import exchanges, kind_of, peak_of_wholes
from shardlib.execute.graph.fuse import Inductor
from shardlib.execute.graph.nodes import link_at, nbytes, sent
from shardlib.execute.graph.trace import BACKWARD, BLOCK, FORWARD, PHASE, REDUCTION
from shardlib.execute.values.keeping import bring, keep, keeping_of, start_bring, start_keep

_MOVES = {keep: "kept", start_keep: "kept", bring: "again whole", start_bring: "again whole"}


def described(graphs: Mapping[str, Graph], traceable: bool, inductor: Inductor | None) -> str:
    """All graphs of a step, by name, or why there is none."""
    if not traceable:
        return "no graph: the loss function cannot be traced, and runs as without compile=True"
    if not graphs:
        return "no graph yet: take a step"
    compiled = [] if inductor is None else [str(inductor)]
    return "\n\n".join([*itertools.starmap(_described, graphs.items()), *compiled])


def _gathers(node: Node) -> bool:
    """Whether a node gathers an input of a block of the ranks' shares."""
    return node.target in (bring, start_bring) and bool(keeping_of(node.args[1]).axis)


def _described(name: str, graph: Graph) -> str:
    """The graph's nodes by phase and block, its exchanges in order, and what it holds of gathered parameters."""
    calls = [node for node in graph.nodes if node.op == "call_function"]
    of_activations = sum(node.target in STARTS or _gathers(node) for node in calls)
    lines = [f"{name}: {len(calls)} nodes, {len(exchanges(graph)) + of_activations} exchanges"]
    for phase in (FORWARD, BACKWARD, REDUCTION):
        members = [node for node in calls if node.meta.get(PHASE) == phase]
        if not members:
            continue
        made = sum(map(nbytes, members))
        lines.append(f"{phase}: {len(members)} nodes, which make {made:,} bytes")
        blocks = Counter(node.meta.get(BLOCK) for node in members)
        named = [f"block {block}: {count}" for block, count in blocks.items() if block is not None]
        if named:
            lines.append("  " + ", ".join(named))
        for node in members:
            if kind := kind_of(node):
                link, size = link_at(node), sum(map(nbytes, sent(node)))
                way = f"over {link.axis!r}" if link.axis else "from another memory"
                lines.append(f"  {kind} {way} of {size:,} bytes: {link.label}")
            elif node.target in _MOVES:
                lines.append(f"  {_MOVES[node.target]} {keeping_of(node.args[1])}")
            elif node.target in STARTS:
                given, _, _, axis, _, about = node.args
                lines.append(f"  {STARTS[node.target]} over {axis!r} of {nbytes(given):,} bytes: {about}")
    peak = peak_of_wholes(graph)
    if peak.units:
        lines.append(f"gathered at a time: {peak.units} units at most, {peak.bytes:,} bytes")
    return "\n".join(lines)
