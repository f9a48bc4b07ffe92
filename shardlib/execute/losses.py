"""Loss functions: the checks of their arguments and results."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from numbers import Real
from typing import Any, NamedTuple

import torch

from shardlib.errors import REENTRANT, LossError
from shardlib.execute.means import as_number, described, is_number
from shardlib.nn.functional import Mean, Means
from shardlib.plan.thinning import Thinned


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
            f"{what} is a module, {type(fn).__name__}, whose own parameters would be neither sharded nor trained: take "
            f"apply, params = sl.from_module(module), and a function of ({parameters}) that calls apply(params, ...)"
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
            f"the weight of the loss must be a number or a scalar tensor and is {described(weight)}; reduce it with .sum()"
        )
    if isinstance(weight, torch.Tensor) and weight.requires_grad:
        raise LossError(
            "the weight of the loss, the second of sl.Mean(total, weight), depends on parameters or on other tensors that "
            "require gradients; its gradient is not computed, since the weight of all micro-batches and ranks is known only "
            "after the last backward. Pass weight.detach(), or return the quotient, a scalar, as the loss"
        )
    return Mean(total.reshape(()), as_number(weight, total.device))


def _require_scalar(name: str, value: Any) -> None:
    if isinstance(value, torch.Tensor) and value.is_complex():
        raise LossError(
            f"the {name} is complex, and only a real one can be minimised; take .real, .abs() or .abs().square() of it"
        )
    if not is_number(value) or not isinstance(value, torch.Tensor):
        raise LossError(
            f"the {name} must be a scalar tensor and is {described(value)}; reduce it with .mean(), or return "
            "sl.Mean(total, weight), or (loss, aux) to return more"
        )


def require_gradient(outcome: Outcome, thinned: Thinned | None, where: str) -> None:
    """Refuse a loss without a gradient, except a `Mean` of weight 0, to which the batch adds nothing.

    Where a step leaves out layers, these may be all that is trained. ``where`` names the rank and the micro-batch.
    """
    left_out = thinned is not None and thinned.dropped
    if not outcome.total.requires_grad and not left_out and not (outcome.weighted and not outcome.weights.any()):
        raise LossError(
            f"the loss {where} does not depend on any trained parameter, so it has no gradient; check for .detach(), .item() "
            "or torch.no_grad() in the loss function, and for freeze() that matches everything. A batch with nothing to "
            "learn from returns sl.Mean(0, 0), and the others sl.Mean(total, weight)"
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
