"""A pass that sends gradients to the memory in which the optimizer works as soon as they are complete."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.fx import Graph

Land = Callable[[str, torch.Tensor], torch.Tensor]  # of a bucket's name and gradient


def landed(land: Land, name: str, gradient: torch.Tensor) -> torch.Tensor:
    """The gradient of a bucket, where ``land`` takes it."""
    return land(name, gradient)


def land(graph: Graph, first: int, names: Sequence[str | None]) -> None:
    """Add an input, and call it for each gradient that does not stay.

    Args:
        first: the number of the first gradient among the graph's outputs.
        names: the gradients' buckets; None for one that stays.
    """
    *_, last = (node for node in graph.nodes if node.op == "placeholder")
    with graph.inserting_after(last):
        given = graph.placeholder("land")
    output = next(node for node in graph.nodes if node.op == "output")
    results = list(output.args[0])
    for number, name in enumerate(names, first):
        if name is not None:
            with graph.inserting_after(results[number]):
                results[number] = graph.call_function(landed, (given, name, results[number]))
    output.args = (results,)
