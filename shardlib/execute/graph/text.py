"""A step's graph as text: nodes and messages, by phase and unit, with bytes."""

from __future__ import annotations

from collections import Counter

from shardlib.execute.graph.alive import exchanges, kind_of, peak_of_wholes
from shardlib.execute.graph.nodes import given, link_at, nbytes
from shardlib.execute.graph.trace import BACKWARD, BLOCK, FORWARD, PHASE, REDUCTION, Traced


def described(traced: Traced) -> str:
    """The graph's nodes by phase and block, its exchanges in order, and what it holds of gathered parameters."""
    graph = traced.graph
    calls = [node for node in graph.nodes if node.op == "call_function"]
    lines = [f"{len(calls)} nodes, {len(exchanges(graph))} exchanges, compiled in {traced.seconds:.2f} s"]
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
                link, size = link_at(node), nbytes(given(node))
                lines.append(f"  {kind} over {link.axis!r} of {size:,} bytes: {link.label}")
    peak = peak_of_wholes(graph)
    if peak.units:
        lines.append(f"gathered at a time: {peak.units} units at most, {peak.bytes:,} bytes")
    return "\n".join(lines)
