"""How many floating-point operations matrix products in operators have, as torch's counter is told."""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Callable
from typing import Any

import torch

from shardlib.kernels.common.operators import qualified_name

_COUNTER = "torch.utils.flop_counter"
_formulas: dict[Any, Callable[..., int]] = {}  # those that torch's counter does not have yet


def counted(name: str, *, forward: Callable[..., int], backward: Callable[..., int]) -> None:
    """Say how many floating-point operations the matrix products of an operation's passes have.

    The profile of a step, plans and torch's ``FlopCounterMode`` then count them. An operation without products needs none.

    Args:
        name: as in `differentiable`.
        forward, backward: of the arguments of the operators, with shapes in place of tensors.

    >>> def product(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    ...     return [x @ w]  # a kernel of your own
    >>> make = sl.kernels.common.opaque("mylib::product", product, lambda x, w: [x.new_empty(len(x), w.shape[1])])
    >>> backward = sl.kernels.common.opaque("mylib::product_backward", product, lambda x, w: [torch.empty_like(x)])
    >>> flops = lambda x, w, **_: 2 * x[0] * x[1] * w[1]
    >>> sl.kernels.common.counted("mylib::product", forward=flops, backward=flops)
    >>> from torch.utils.flop_counter import FlopCounterMode
    >>> with FlopCounterMode(display=False) as counter:
    ...     _ = make(torch.ones(2, 3), torch.ones(3, 4))
    >>> counter.get_total_flops()
    48
    """
    namespace, operation = qualified_name(name).split("::")
    operators = getattr(torch.ops, namespace)
    for suffix, formula in (("", forward), ("_backward", backward)):
        _formulas[getattr(operators, operation + suffix)] = formula
    if _COUNTER in sys.modules:
        _register_formulas()


def _register_formulas() -> None:
    for operator, formula in _formulas.items():
        sys.modules[_COUNTER].register_flop_formula(operator)(formula)
    _formulas.clear()


class _CounterFinder(importlib.abc.MetaPathFinder):
    """Gives torch's counter the formulas once somebody imports it: with Triton its import takes a third of a second."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != _COUNTER:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        spec: Any = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_register(module: Any) -> None:
            execute(module)
            _register_formulas()

        spec.loader.exec_module = execute_and_register
        return spec


sys.meta_path.insert(0, _CounterFinder())
