"""Loss functions: the checks of their arguments and results."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from numbers import Real
from typing import Any, NamedTuple

import optree
import torch

from shardlib.collectives.primitives import sum_over
from shardlib.collectives.summation import Summation
from shardlib.errors import REENTRANT, LossError
from shardlib.mesh.mesh import Mesh
from shardlib.mesh.transport.activity import naming
from shardlib.nn.functional import Mean, Means
from shardlib.plan.drops import DropPlan
from shardlib.plan.plan import Plan
from shardlib.tree import Tree, path_names

# Combining the results of several calls, and of all ranks: every `Mean` in them is summed.


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


class Outcome(NamedTuple):
    """The result of one call of a loss function.

    Attributes:
        means: the terms of a sum of means, or the only one, of tensors, 0-d; a scalar loss has weight 1.
        weighted: whether the loss is a `Mean`, or a sum of means.
        aux: what the function returned besides the loss, or None.
        buffers: the returned buffers, or None.
    """

    means: tuple[Mean, ...]
    weighted: bool
    aux: Any
    buffers: Any

    @property
    def total(self) -> torch.Tensor:
        """The loss, or the total of a `Mean`; the totals' sum of several, for what depends on all of them."""
        first, *others = (mean.total for mean in self.means)
        return sum(others, start=first)

    @property
    def weights(self) -> torch.Tensor:
        """The means' weights in float64, ``[terms]``."""
        return torch.stack([mean.weight for mean in self.means]).double()


def require_function(fn: Any, what: str, parameters: str) -> None:
    """Refuse anything but a pure function. ``what`` and ``parameters`` name it and its parameters in messages.

    Raises:
        LossError: not callable, or a module with parameters, which would be neither sharded nor trained.
    """
    if isinstance(fn, torch.nn.Module) and any(True for _ in fn.parameters()):
        raise LossError(
            f"{what} is a module, {type(fn).__name__}. Take apply, params = sl.from_module(module), and call apply in "
            f"a function of ({parameters})"
        )
    if not callable(fn):
        raise LossError(f"{what} must be a function of ({parameters}) and is {described(fn)}")


def require_no_buffers(fn: Callable[..., Any], remedy: str) -> None:
    """Refuse a loss function that takes buffers, where it is given none.

    Raises:
        TypeError: it needs a third argument, which is none that it gets by name.
    """
    try:
        given = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return
    due = [
        each.name for each in given if each.kind in _BY_POSITION and each.default is each.empty and each.name != "rng"
    ]
    if len(due) > 2:
        raise TypeError(f"the loss function takes buffers, ({', '.join(due)}), and is given none: {remedy}")


_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def wants(fn: Callable[..., Any], name: str) -> bool:
    """Whether ``fn`` has a parameter of this name."""
    return _parameter(fn, name) is not None


def needs(fn: Callable[..., Any], name: str) -> bool:
    """Whether ``fn`` has a parameter of this name without a default."""
    parameter = _parameter(fn, name)
    return parameter is not None and parameter.default is inspect.Parameter.empty


def _parameter(fn: Callable[..., Any], name: str) -> inspect.Parameter | None:
    try:
        return inspect.signature(fn).parameters.get(name)
    except (TypeError, ValueError):
        return None


def read_loss(value: Any, with_buffers: bool) -> Outcome:
    """Unpack ``loss``, ``(loss, aux)``, ``(loss, buffers)`` or ``((loss, aux), buffers)``.

    Raises:
        LossError: a result of another form, a loss that is not a real scalar, or a weight that depends on parameters.
    """
    buffers = None
    if with_buffers:
        if not _is_pair(value):
            raise LossError(
                f"a loss function with buffers must return (loss, buffers), and returned {described(value)}"
            )
        value, buffers = value
    aux = None
    if _is_pair(value):
        value, aux = value
    if isinstance(value, (Mean, Means)):
        return Outcome(tuple(map(_checked, _tensors(value))), True, aux, buffers)
    _require_scalar("loss", value)
    return Outcome((Mean(value.reshape(()), torch.ones((), device=value.device)),), False, aux, buffers)


def _tensors(value: Mean | Means) -> tuple[Mean, ...]:
    """The terms of a loss. Constants, such as those of sl.Mean(0, 0), are tensors where the other numbers are."""
    terms = (value,) if isinstance(value, Mean) else value.terms
    numbers = [number for term in terms for number in term]
    device = next((number.device for number in numbers if isinstance(number, torch.Tensor)), torch.device("cpu"))
    return tuple(
        Mean(as_number(total, device) if isinstance(total, Real) else total, weight) for total, weight in terms
    )


def _checked(mean: Mean) -> Mean:
    """A mean in the loss, of tensors."""
    total, weight = mean
    _require_scalar("total of the loss", total)
    if not is_number(weight):
        raise LossError(
            f"the weight of the loss must be a number or scalar tensor and is {described(weight)}; reduce it with "
            ".sum()"
        )
    if isinstance(weight, torch.Tensor) and weight.requires_grad:
        raise LossError("the weight of sl.Mean requires a gradient. Pass weight.detach(), or return total / weight")
    return Mean(total.reshape(()), as_number(weight, total.device))


def _require_scalar(name: str, value: Any) -> None:
    if isinstance(value, torch.Tensor) and value.is_complex():
        raise LossError(f"the {name} is complex and must be real; take .real, .abs() or .abs().square() of it")
    if not is_number(value) or not isinstance(value, torch.Tensor):
        raise LossError(
            f"the {name} must be a scalar tensor and is {described(value)}; use .mean(), sl.Mean(total, weight) or "
            "(loss, aux)"
        )


def require_gradient(outcome: Outcome, drops: DropPlan | None, where: str) -> None:
    """Refuse a loss without a gradient, except a `Mean` of weight 0, to which the batch adds nothing.

    Where a step leaves out layers, these may be all that is trained. ``where`` names the rank and the micro-batch.
    """
    left_out = drops is not None and drops.dropped
    if not outcome.total.requires_grad and not left_out and not (outcome.weighted and not outcome.weights.any()):
        raise LossError(
            f"the loss {where} does not depend on any trained parameter: look for .detach(), .item(), torch.no_grad() "
            "and freeze(); an empty batch returns sl.Mean(0, 0)"
        )


def refuse_reentrant_checkpoints(total: torch.Tensor) -> None:
    """Raise if the graph has a reentrant checkpoint: its inner backward would lose gradients of parameters."""
    seen, todo = set(), [total.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "CheckpointFunctionBackward":
            raise LossError(f"the loss {REENTRANT}")
        todo += [previous for previous, _ in node.next_functions]


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and not isinstance(value, Mean)
