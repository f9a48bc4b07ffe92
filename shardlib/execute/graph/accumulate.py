"""Gradients that a graph adds to sums over micro-batches as soon as it has them: no second set of them is in memory."""

from __future__ import annotations

import torch
from torch.fx import Graph


def accumulate(graph: Graph, gradients: int) -> None:
    """Add the last results to further inputs of the graph, in their order, in place of returning them."""
    *_, last = (node for node in graph.nodes if node.op == "placeholder")
    output = next(iter(reversed(graph.nodes)))
    (results,) = output.args
    kept, found = results[: len(results) - gradients], results[len(results) - gradients :]
    for number, gradient in enumerate(found):
        with graph.inserting_after(last):
            last = graph.placeholder(f"sum_{number}")
        with graph.inserting_before(output) if gradient.op == "placeholder" else graph.inserting_after(gradient):
            added = graph.call_function(torch.ops.aten.add_.Tensor, (last, gradient))
        added.meta = dict(gradient.meta)
    output.args = (kept,)
    graph.lint()
