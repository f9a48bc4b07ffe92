"""Results of a function that is called several times: what is a `Mean` in them adds up over calls, and over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from numbers import Real
from typing import Any

import optree
import torch

from shardlib.collectives.primitives import sum_over
from shardlib.mesh.mesh import Mesh
from shardlib.nn.functional import Mean
from shardlib.plan.plan import Plan
from shardlib.tree import Tree, path_name


def is_mean(value: Any) -> bool:
    return isinstance(value, Mean)


class Results:
    """The last call's result, but every `Mean` in it is the sum of all calls'. Means are paired by their paths.

    Args:
        device: where sums are kept, float64.
        call: what one call is to the user: "micro-batch" or "batch".
        name: what a result is to the user.

    Attributes:
        tree: that result; None before the first call.
        paths: of the means in it.
        faults: what keeps results from adding up; what is faulty is left out.
    """

    def __init__(self, device: torch.device, call: str, name: str) -> None:
        self._device, self._call, self._name = device, call, name
        self.tree: Tree = None
        self.paths: tuple[str, ...] = ()
        self.faults: list[str] = []
        self._sums: torch.Tensor | None = None
        self._calls = 0

    def add(self, result: Tree) -> None:
        number, self._calls = self._calls, self._calls + 1
        found = means(result)
        wrong = [
            f"{name} {part} is {described(value)}"
            for name, mean in found.items()
            for part, value in zip(Mean._fields, mean)
            if not is_number(value)
        ]
        if wrong:
            self.faults.append(
                f"{self._name}: a sl.Mean is of real numbers, one total and one weight, and {', '.join(wrong)}; reduce it "
                "with .sum(), or return a sl.Mean for each number (.real and .imag of a complex one)"
            )
            return
        paths = tuple(found)
        if number and paths != self.paths:
            self.faults.append(
                f"{self._call} {number} has sl.Mean at {_listed(paths)} of {self._name} and the one before at "
                f"{_listed(self.paths)}; return the same ones each time, sl.Mean(0, 0) where there is nothing to count"
            )
            return
        self.tree, self.paths = result, paths
        if found:
            values = torch.stack([as_number(value, self._device) for mean in found.values() for value in mean])
            self._sums = values if self._sums is None else self._sums + values
            self.tree = _with_means(result, (Mean(*pair.unbind()) for pair in self._sums.view(-1, 2)))

    @property
    def form(self) -> str:
        return f"{self._name} with sl.Mean at {_listed(self.paths)}"


def sum_means(tree: Tree, plan: Plan, mesh: Mesh) -> Tree:
    """Every `Mean` of a pytree summed over all ranks' batches. All ranks have means at the same paths."""
    found = means(tree)
    if not found:
        return tree
    values = torch.stack([as_number(value, mesh.device) for mean in found.values() for value in mean])
    sum_over(mesh, plan.batch_axes, values)
    return _with_means(tree, (Mean(*pair.unbind()) for pair in values.view(-1, 2)))


def quotients(tree: Tree) -> Tree:
    """Every `Mean` that `sum_means` gave as a number, NaN where it weighs nothing; other leaves as they are."""
    values = (torch.where(weight == 0, torch.nan, total / weight) for total, weight in means(tree).values())
    return _with_means(tree, values)


def means(tree: Tree) -> dict[str, Mean]:
    """By path, in the tree's order."""
    paths, leaves, _ = optree.tree_flatten_with_path(tree, is_leaf=is_mean)
    return {path_name(path): leaf for path, leaf in zip(paths, leaves) if is_mean(leaf)}


def is_number(value: Any) -> bool:
    """Whether it is one real number: Python's, NumPy's, or a tensor of one element."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, Real)


def as_number(value: Any, device: torch.device) -> torch.Tensor:
    """A value as float64, 0-d, detached."""
    if isinstance(value, torch.Tensor):
        return value.detach().reshape(()).to(device, torch.float64)
    return torch.tensor(float(value), dtype=torch.float64, device=device)


def described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a {'complex ' if value.is_complex() else ''}tensor of shape {tuple(value.shape)}"
    return type(value).__name__


def _with_means(tree: Tree, values: Iterator[Any]) -> Tree:
    return optree.tree_map(lambda leaf: next(values) if is_mean(leaf) else leaf, tree, is_leaf=is_mean)


def _listed(paths: tuple[str, ...]) -> str:
    return ", ".join(repr(path) if path else "its top" for path in paths) or "no place"
