"""A pass that computes blocks again in backward, as `shardlib.remat` says, in place of keeping what they computed.

What is drawn from torch's own generators is kept, and so are decisions (`environment.once`), numbers that the host reads, and
what is written to outside of the block that made it. The library's draws are made again, from the same seeds.
"""

from __future__ import annotations

import operator
from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from shardlib.common._compat import is_operator
from shardlib.execute.graph.nodes import (
    BACKWARD,
    BLOCK,
    DECIDED,
    EXCHANGES,
    FORWARD,
    NAMES,
    PHASE,
    changes,
    copied,
    draws,
    fetched,
    given,
    positions,
    roots_of,
    value_of,
    writes_of,
)
from shardlib.execute.recompute import policy_of
from shardlib.plan.recompute import Recompute

_SAVES = (True, CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)


def recompute(graph: Graph, how: Recompute) -> None:
    """Compute the nodes of blocks again where backward uses them."""
    wholes, roots = fetched(graph), roots_of(graph)
    writes = writes_of(roots)
    chosen = _computed_again(graph, how, wholes, roots, writes)
    again: dict[Node, Node] = {}

    def computed(node: Node, at: Node) -> Node:
        if node not in chosen:
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


def _computed_again(
    graph: Graph,
    how: Recompute,
    wholes: Container[Node],
    roots: Mapping[Node, Node],
    writes: Mapping[Node, Sequence[Node]],
) -> set[Node]:
    """The nodes of forward that are computed again where backward uses them. Arguments as `fetched`, `roots_of` and
    `writes_of` give them."""
    place, policy = positions(graph), policy_of(how)
    written = {root: place[nodes[-1]] for root, nodes in writes.items()}  # the last time
    named = {roots[node] for node in graph.nodes if not set(how.save).isdisjoint(node.meta.get(NAMES, ()))}
    settled = {root for root, nodes in writes.items() if _is_settled(root, nodes)}
    chosen: set[Node] = set()

    def changes_later(node: Node) -> bool:
        """Whether what a node reads, writes to or makes has another value later, or had one before."""
        mine = {roots[node], *(roots[each] for each in changes(node))}
        reads = {roots[each] for each in node.all_input_nodes} - mine
        unsettled = any(root in written and root not in settled for root in mine)
        return unsettled or any(written.get(root, -1) > place[node] for root in reads)

    for node in graph.nodes:
        block = node.meta.get(BLOCK)
        if node.op != "call_function" or node in wholes or block is None or not how.covers(block):
            continue
        if node.meta.get(PHASE) != FORWARD or node.meta.get(DECIDED):
            continue
        saved = policy is not None and is_operator(node.target) and _saves(policy, node)
        if saved or roots[node] in named or not isinstance(value_of(node), torch.Tensor | list | tuple):
            continue
        if node.target in EXCHANGES or draws(node) or changes_later(node):
            continue
        if node.target is operator.getitem and given(node) not in chosen:
            continue
        # What is used outside of its block is kept for those who use it.
        if all(user.meta.get(PHASE) != FORWARD or user.meta.get(BLOCK) == block for user in node.users):
            chosen.add(node)
    # What is written to is computed again with all that writes to it, or not at all.
    kept = {root for root in settled if not chosen.issuperset((root, *writes[root]))}
    return {node for node in chosen if roots[node] not in kept}


def _is_settled(root: Node, writes: Sequence[Node]) -> bool:
    """Whether what is written to is made, and written, in forward in one block, by nodes that give it and nothing else."""
    block = root.meta.get(BLOCK)
    return root.op == "call_function" and all(
        node.meta.get(BLOCK) == block and node.meta.get(PHASE) == FORWARD and changes(node) == [given(node)]
        for node in writes
    )


def _saves(policy: Any, node: Node) -> bool:
    """Whether a policy keeps a node's result. It is given tensors without values."""
    context = SelectiveCheckpointContext(is_recompute=False)
    context.op_output = value_of(node)
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), value_of)
    return policy(context, node.target, *args, **kwargs) in _SAVES
