"""A pass that computes blocks again in backward, as `shardlib.remat` says, in place of keeping what they computed.

What is drawn from torch's own generators is kept, and so are decisions (`shardlib.common.once`), numbers that the host reads,
and what is written to, which has no one value. The library's draws are made again, from the same seeds.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from shardlib.common._compat import is_operator
from shardlib.execute.activations.checkpointing import policy_of
from shardlib.execute.graph.nodes import (
    EXCHANGES,
    changes,
    copied,
    draws,
    fetched,
    given,
    positions,
    roots_of,
    value_of,
)
from shardlib.execute.graph.trace import BACKWARD, BLOCK, DECIDED, FORWARD, NAMES, PHASE
from shardlib.plan.recompute import Recompute

_SAVES = (True, CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)


def recompute(graph: Graph, how: Recompute) -> None:
    """Compute the nodes of blocks again where backward uses them."""
    wholes, chosen = fetched(graph), _computed_again(graph, how)
    again: dict[Node, Node] = {}

    def computed(node: Node, at: Node) -> Node:
        if node not in chosen:
            return node
        if node not in again:
            for each in node.all_input_nodes:
                if each.meta.get(BLOCK) == node.meta[BLOCK]:
                    computed(each, at)
            with graph.inserting_before(at):
                made = copied(node, again, graph)
            made.meta = node.meta | {PHASE: BACKWARD}
        return again[node]

    for node in list(graph.nodes):
        if node.meta.get(PHASE) == BACKWARD and node not in wholes:
            for each in node.all_input_nodes:
                node.replace_input_with(each, computed(each, node))


def _computed_again(graph: Graph, how: Recompute) -> set[Node]:
    """The nodes of forward that are computed again where backward uses them."""
    wholes, roots, place, policy = fetched(graph), roots_of(graph), positions(graph), policy_of(how)
    written = {roots[each]: place[node] for node in graph.nodes for each in changes(node)}  # the last time
    named = {roots[node] for node in graph.nodes if not set(how.save).isdisjoint(node.meta.get(NAMES, ()))}
    chosen: set[Node] = set()

    def changes_later(node: Node) -> bool:
        read = (written.get(roots[each], -1) for each in node.all_input_nodes)
        return bool(changes(node)) or roots[node] in written or any(last > place[node] for last in read)

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
    return chosen


def _saves(policy: Any, node: Node) -> bool:
    """Whether a policy keeps a node's result. It is given tensors without values."""
    context = SelectiveCheckpointContext(is_recompute=False)
    context.op_output = value_of(node)
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), value_of)
    return policy(context, node.target, *args, **kwargs) in _SAVES
