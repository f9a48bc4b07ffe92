"""Gradients that a graph adds to sums over micro-batches as soon as it has them: no second set of them is in memory."""

from __future__ import annotations

import torch
from torch.fx import Graph

from shardlib.execute.graph.nodes import added_input


def accumulate(graph: Graph, first: int, count: int) -> None:
    """Add gradients to further inputs of the graph, in their order, in place of returning them.

    Args:
        first, count: the number of the first gradient among the graph's results, and how many they are.
    """
    *_, last = (node for node in graph.nodes if node.op == "placeholder")
    output = next(iter(reversed(graph.nodes)))
    (results,) = output.args
    for number, gradient in enumerate(results[first : first + count]):
        with graph.inserting_after(last):
            last = added_input(graph, f"sum_{number}")
        with graph.inserting_before(output) if gradient.op == "placeholder" else graph.inserting_after(gradient):
            added = graph.call_function(torch.ops.aten.add_.Tensor, (last, gradient))
        added.meta = dict(gradient.meta)
    output.args = ([*results[:first], *results[first + count :]],)
