"""The place where products by parameters are seen, which a plan may compute in 8 bits (`shardlib.precision("fp8")`).

A mode sees what the loss calls: layers' functions and matrix products of which one factor is such a parameter, or a view of
one. Slices' products are between the collectives of their style, and look at the handle themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from shardlib.common._compat import outside_of_graphs, pytree
from shardlib.errors import HandleError
from shardlib.execute.handles import materialise
from shardlib.execute.slicing import SlicedHandle
from shardlib.nn.scaled import scaled_linear, scaled_matmul

_MATMULS = (torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.__matmul__)


class ScaledProducts(TorchFunctionMode):
    """A mode that computes products by some parameters in 8 bits.

    Args:
        is_scaled: whether a matrix is such a parameter, or lies in its memory.
    """

    def __init__(self, is_scaled: Callable[[torch.Tensor], bool]) -> None:
        super().__init__()
        self._is_scaled = is_scaled

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_dynamo_compiling():
            _refuse_compiled("a compiled function runs in a loss with parameters")
        kwargs = kwargs or {}
        if func is F.linear and self._weighs(*args[1:2], *([kwargs["weight"]] if "weight" in kwargs else ())):
            return _linear(*args, **kwargs)
        if func in _MATMULS and len(args) == 2 and args[1].dim() == 2 and self._weighs(*args):
            return scaled_matmul(*materialise(args))
        if func is torch.addmm and len(args) == 3 and not kwargs and self._weighs(*args[1:]):
            bias, *factors = materialise(args)
            return scaled_matmul(*factors) + bias
        return func(*args, **kwargs)

    def is_scaled(self, factor: Any) -> bool:
        """Whether products by a factor are in 8 bits."""
        return isinstance(factor, torch.Tensor) and factor.dim() == 2 and self._is_scaled(factor)

    def _weighs(self, *factors: Any) -> bool:
        """Whether one of the factors of a product is a parameter whose products are in 8 bits."""
        return not any(isinstance(each, SlicedHandle) for each in factors) and any(map(self.is_scaled, factors))


def refuse_scaled(mode: ScaledProducts | None, value: Any) -> None:
    """Raise if a compiled block is given parameters whose products are in 8 bits: its compiler does not see the mode."""
    if mode is not None and any(map(mode.is_scaled, pytree.tree_leaves(value))):
        _refuse_compiled("a compiled block is given parameters")


@outside_of_graphs
def _refuse_compiled(what: str) -> NoReturn:
    raise HandleError(
        f"{what} whose products are in 8 bits (sl.precision('fp8')), which torch.compile does not see. Leave them out, "
        "leaves={glob: 'bf16'}, or do not compile it"
    )


def _linear(input: Any, weight: Any, bias: Any = None) -> torch.Tensor:
    return scaled_linear(*materialise((input, weight, bias)))
