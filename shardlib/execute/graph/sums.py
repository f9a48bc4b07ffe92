"""What becomes of gradients that a graph has made: they leave for the optimizer's memory, or are added to sums.

Both happen as soon as a gradient is complete, so that no second set of them is in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch.fx import Graph
from torch.fx import Node as GraphNode

from shardlib.collectives.tree_sum import Node, TreeSum, joined
from shardlib.execute.batches import batch_index
from shardlib.execute.graph.nodes import added_input
from shardlib.execute.values.function import Function
from shardlib.mesh.mesh import Mesh
from shardlib.plan.plan import Plan
from shardlib.sharded.gradient_offload import GradientOffload

Land = Callable[[str, torch.Tensor], torch.Tensor]  # of a bucket's name and gradient


def accumulate(graph: Graph, first: int, count: int) -> None:
    """Add gradients to further inputs of the graph, in their order, in place of returning them.

    Args:
        first, count: the number of the first gradient among the graph's results, and how many they are.
    """
    last, output, results = _ends(graph)
    for number, gradient in enumerate(results[first : first + count]):
        with graph.inserting_after(last):
            last = added_input(graph, f"sum_{number}")
        with graph.inserting_before(output) if gradient.op == "placeholder" else graph.inserting_after(gradient):
            added = graph.call_function(torch.ops.aten.add_.Tensor, (last, gradient))
        added.meta = dict(gradient.meta)
    output.args = ([*results[:first], *results[first + count :]],)


def landed(land: Land, name: str, gradient: torch.Tensor) -> torch.Tensor:
    """The gradient of a bucket, where ``land`` takes it."""
    return land(name, gradient)


def land(graph: Graph, first: int, names: Sequence[str | None]) -> None:
    """Add an input, and call it for each gradient that does not stay.

    Args:
        first: the number of the first gradient among the graph's outputs.
        names: the gradients' buckets; None for one that stays.
    """
    last, output, results = _ends(graph)
    with graph.inserting_after(last):
        given = graph.placeholder("land")
    for number, name in enumerate(names, first):
        if name is not None:
            with graph.inserting_after(results[number]):
                results[number] = graph.call_function(landed, (given, name, results[number]))
    output.args = (results,)


def _ends(graph: Graph) -> tuple[GraphNode, GraphNode, list[Any]]:
    """A graph's last input, its output, and the results in it."""
    *_, last = (node for node in graph.nodes if node.op == "placeholder")
    output = next(iter(reversed(graph.nodes)))
    return last, output, list(output.args[0])


class GradientSums:
    """One step's gradients, summed over micro-batches: on the device, or where they land."""

    def __init__(self, plan: Plan, mesh: Mesh, landing: GradientOffload | None) -> None:
        self._plan, self._landing = plan, landing
        self._leaf_of = {tile.name: bucket for bucket in plan.trained for tile in bucket.cut}
        self._held: dict[str, torch.Tensor] = {}
        self._joined: dict[str, torch.Tensor] = {}  # of leaves in tiles, whose gradient is never there twice
        self._landed: dict[str, torch.Tensor] = {}
        self._taken: set[str] = set()  # by `land`, in this micro-batch
        leaves = plan.step.total_microbatches
        self._trees = (
            {} if leaves is None else {bucket.name: TreeSum[torch.Tensor](leaves) for bucket in plan.tiled.trained}
        )
        self._first = batch_index(plan, mesh) * plan.step.microbatches  # the first micro-batch of this rank, among all

    def land(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient of a bucket, where the optimizer works, or with those of the leaf's other tiles."""
        bucket = self._leaf_of[name]
        landing = self._landing if self._landing and self._landing.takes(bucket) else None
        if bucket.tiles > 1 and (landing is not None or self._plan.step.microbatches == 1):
            if bucket.name not in self._joined:
                self._joined[bucket.name] = gradient.new_empty(bucket.tiles * gradient.numel())
            tiles = [tile.name for tile in bucket.cut]
            gradient = bucket.of_tiles(self._joined[bucket.name])[tiles.index(name)].copy_(gradient)
            self._taken.add(name)
            if landing is None or not self._taken.issuperset(tiles):
                return gradient
            gradient = self._joined.pop(bucket.name)
        if landing is not None:
            self._taken.add(name)
            gradient = self._landed[bucket.name] = landing.take(bucket, gradient)
        return gradient

    def add(self, index: int, gradients: Mapping[str, torch.Tensor]) -> None:
        """Add those of one micro-batch, whose memory may be used up."""
        for name, new in gradients.items():
            if name in self._taken:
                continue
            if self._trees:
                self._trees[name].add(Node(0, self._first + index), new)
            else:
                self._held[name] = self._held[name].add_(new) if name in self._held else new
        self._taken.clear()

    def sums(self) -> dict[str, torch.Tensor]:
        """Bucket name -> the sum, or as many as there are nodes of the tree in which micro-batches are added."""
        nodes = self._plan.step.nodes
        return (
            self._held
            | self._joined
            | self._landed
            | {name: joined(tree.sums, nodes) for name, tree in self._trees.items()}
        )


class StageSums:
    """The sums of a stage's gradients over micro-batches, which are made when the first ones come."""

    def __init__(self, function: Function) -> None:
        self._function = function

    @cached_property
    def _held(self) -> dict[str, torch.Tensor]:
        return self._function.sums()

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """The sums, for a graph to add to."""
        return list(self._function.in_tiles(self._held).values())

    def result(self) -> dict[str, torch.Tensor]:
        """The sums over ranks, as the optimizer holds them."""
        function = self._function
        return function.joined(function.reduced(function.in_tiles(self._held), {}), self._held)
