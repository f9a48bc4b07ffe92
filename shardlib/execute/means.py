"""Combining the results of several calls, and of all ranks: every `Mean` in them is summed."""

from __future__ import annotations

from collections.abc import Iterator
from numbers import Real
from typing import Any

import optree
import torch

from shardlib.collectives.primitives import sum_over
from shardlib.collectives.summation import Summation
from shardlib.mesh.mesh import Mesh
from shardlib.mesh.transport.activity import naming
from shardlib.nn.functional import Mean, Means
from shardlib.plan.plan import Plan
from shardlib.tree import Tree, path_names


def is_mean(value: Any) -> bool:
    """Whether a value is a `Mean`; for pytree functions, which would otherwise flatten it."""
    return isinstance(value, Mean)


class Results:
    """The combined results of several calls: the last call's result, with every `Mean` in it summed over all calls.

    Args:
        device: device of the sums.
        summation: how sums are made. In `tree` a mean holds its total and its weight as this holds sums.
        call: how messages name one call: "micro-batch" or "batch".
        name: how messages name a result.

    Attributes:
        tree: the combined result; None before the first call.
        paths: paths of the means in it. They must be the same in all calls.
        faults: errors, with remedies, in results that could not be added; these results are left out.
    """

    def __init__(self, device: torch.device, summation: Summation, call: str, name: str) -> None:
        self._device, self._summation, self._call, self._name = device, summation, call, name
        self.tree: Tree = None
        self.paths: tuple[str, ...] = ()
        self.faults: list[str] = []
        self._sums: torch.Tensor | None = None
        self._calls = 0

    def add(self, result: Tree) -> None:
        number, self._calls = self._calls, self._calls + 1
        by_path = means(result)
        wrong = [
            f"{path} {field} is {described(value)}"
            for path, mean in by_path.items()
            for field, value in zip(Mean._fields, mean)
            if not is_number(value)
        ]
        if wrong:
            self.faults.append(
                f"{self._name}: a sl.Mean is of real numbers, one total and one weight, and {', '.join(wrong)}; reduce it "
                "with .sum(), or return a sl.Mean for each number (.real and .imag of a complex one)"
            )
            return
        paths = tuple(by_path)
        if number and paths != self.paths:
            self.faults.append(
                f"{self._call} {number} has sl.Mean at {_listed(paths)} of {self._name} and the one before at "
                f"{_listed(self.paths)}; return the same ones each time, sl.Mean(0, 0) where there is nothing to count"
            )
            return
        self.tree, self.paths = result, paths
        if by_path:
            values = torch.stack([as_number(value, self._device) for mean in by_path.values() for value in mean])
            sums = self._summation.numbers(values)
            self._sums = sums if self._sums is None else self._sums + sums
            self.tree = _with_means(result, (Mean(*pair) for pair in self._sums.split(2)))

    @property
    def form(self) -> str:
        return f"{self._name} with sl.Mean at {_listed(self.paths)}"


@naming("means beside the loss")
def sum_means(tree: Tree, plan: Plan, mesh: Mesh) -> Tree:
    """`Results.tree` with every `Mean` summed over all ranks' batches. All ranks must have means at the same paths."""
    by_path = means(tree)
    if not by_path:
        return tree
    sums = torch.stack([held for mean in by_path.values() for held in mean])
    sum_over(mesh, plan.batch_axes, sums)
    return _with_means(tree, (Mean(*pair) for pair in plan.reductions.summation.values(sums).split(2)))


def quotients(tree: Tree) -> Tree:
    """A pytree with every `Mean`, or sum of means, as a number: see `quotient`. Other leaves are unchanged."""

    def divided(leaf: Any) -> Any:
        if not isinstance(leaf, (Mean, Means)):
            return leaf
        return quotient(
            torch.stack([torch.stack(mean) for mean in (leaf.terms if isinstance(leaf, Means) else (leaf,))])
        )

    return optree.tree_map(divided, tree, is_leaf=lambda leaf: isinstance(leaf, (Mean, Means)))


def quotient(means: torch.Tensor) -> torch.Tensor:
    """The sum of totals over weights, ``[terms, 2]``, without those of weight 0; NaN if all are. 0-d."""
    totals, weights = means.unbind(1)
    value = torch.where(weights == 0, 0.0, totals / weights).sum()
    return torch.where((weights == 0).all(), torch.nan, value)


def means(tree: Tree) -> dict[str, Mean]:
    """Path -> `Mean`, for the means of a pytree, in its order."""
    paths, leaves, _ = optree.tree_flatten_with_path(tree, is_leaf=is_mean)
    return {path: leaf for path, leaf in zip(path_names(paths), leaves) if is_mean(leaf)}


def is_number(value: Any) -> bool:
    """Whether a value is one real number: of Python, of NumPy, a length in a trace, or a tensor of one element."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, Real | torch.SymInt | torch.SymFloat)


def as_number(value: Any, device: torch.device) -> torch.Tensor:
    """A number as a detached 0-d tensor in float64."""
    if isinstance(value, torch.Tensor):
        return value.detach().reshape(()).to(device, torch.float64)
    if not isinstance(value, Real):
        return torch.full((), value, dtype=torch.float64, device=device)
    return torch.tensor(float(value), dtype=torch.float64, device=device)


def described(value: Any) -> str:
    """A value by its type, and for a tensor its shape, in the words of a message."""
    if isinstance(value, torch.Tensor):
        return f"a {'complex ' if value.is_complex() else ''}tensor of shape {tuple(value.shape)}"
    return type(value).__name__


def _with_means(tree: Tree, values: Iterator[Any]) -> Tree:
    return optree.tree_map(lambda leaf: next(values) if is_mean(leaf) else leaf, tree, is_leaf=is_mean)


def _listed(paths: tuple[str, ...]) -> str:
    return ", ".join(repr(path) if path else "its top" for path in paths) or "no path"
