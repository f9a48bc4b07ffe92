"""Values and sizes in a trace on fake tensors, which have neither where they depend on values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from shardlib.common._compat import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    OperatorMode,
    grouped_product,
    no_modes,
    unique,
)
from shardlib.tree import leaves_of, tensors_of

# What fake tensors raise where a value is read, or a size depends on values.
UNKNOWN = DataDependentOutputException, DynamicOutputShapeException
_LARGEST = 1 << 26  # bytes of a result that is computed


class Values(OperatorMode):
    """A mode, on top of that of fake tensors, in which what is computed from a batch's integers alone has values.

    So a function that looks at them (whether a mask leaves out nothing, say) goes the way that it goes in a step. Where a
    size depends on values that nobody has, it is the largest that it can be.

    Attributes:
        read: whether the function has read values of the batch.
        bounded: operators whose results have the largest size that they can have.
    """

    read: bool

    def __init__(self) -> None:
        super().__init__()
        self.read = False
        self.bounded: dict[str, None] = {}
        self._known = WeakTensorKeyDictionary()

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What the trace takes for granted, a sentence each."""
        read = "The loss reads integers of its batch: traced as with those of this one"
        bounds = f"Sizes depend on values ({', '.join(self.bounded)}): traced as if every element were chosen"
        return (read,) * self.read + (bounds,) * bool(self.bounded)

    def known(self, leaf: torch.Tensor) -> torch.Tensor:
        """A copy of a leaf of the batch, whose values are known."""
        copy = leaf.clone()
        self._known[copy] = None
        return copy

    def _take(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensors = tensors_of((args, kwargs))
        if tensors and all(tensor in self._known for tensor in tensors) and not _large(func, args, kwargs):
            with no_modes():
                result = func(*args, **kwargs)
            made = tensors_of(result)
            self._known.update(dict.fromkeys(made))
            self.read |= not made
            return result
        instead = _INSTEAD.get(func)
        return func(*args, **kwargs) if instead is None else instead(self, func, args, kwargs)

    def places(self, mask: torch.Tensor, name: str) -> list[torch.Tensor]:
        """The indices of a mask's true elements, one tensor per dimension; of all elements, if they are not known."""
        if mask in self._known:
            self.read = True
            with no_modes():
                return list(mask.nonzero().unbind(1))
        self.bounded[name] = None
        return [mask.new_empty(mask.numel(), dtype=torch.int64) for _ in range(mask.dim())]


def _large(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether the result of an operator is too large to compute."""
    try:
        made = func(*args, **kwargs)  # on fake tensors
    except UNKNOWN:
        return False
    return sum(leaf.nbytes for leaf in leaves_of(made) if isinstance(leaf, torch.Tensor)) > _LARGEST


def _nonzero(values: Values, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    return torch.stack(values.places(args[0], "nonzero"), 1)


def _index(values: Values, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    x, indices = args
    taken: list[torch.Tensor | None] = []
    for index in indices:
        masks = index is not None and index.dtype in (torch.bool, torch.uint8)
        taken += values.places(index, "a mask as index") if masks else [index]
    return func(x, taken)


def _masked_select(values: Values, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    x, mask = args
    if mask in values._known and mask.shape == x.shape:
        return x.new_empty(len(values.places(mask, "masked_select")[0]))
    values.bounded["masked_select"] = None
    return x.new_empty(torch.broadcast_shapes(x.shape, mask.shape).numel())


def _unique(values: Values, func: Any, args: Any, kwargs: Any) -> tuple[torch.Tensor, ...]:
    x = args[0]
    values.bounded["unique"] = None
    return x.new_empty(x.numel()), torch.empty_like(x, dtype=torch.int64), x.new_empty(x.numel(), dtype=torch.int64)


def _grouped_mm(values: Values, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    """Torch's own rule knows bf16 alone, and its kernel on CPUs every dtype."""
    a, b, ends = [*args, *kwargs.values()][:3]
    if a.dtype == torch.bfloat16:
        return func(*args, **kwargs)
    groups = [len(ends)] if a.dim() == b.dim() == 2 else [len(a)] if a.dim() == b.dim() == 3 else []
    return a.new_empty(*groups, a.shape[-2], b.shape[-1])


_INSTEAD: Mapping[Any, Callable[[Values, Any, Any, Any], Any]] = {
    torch.ops.aten.nonzero.default: _nonzero,
    torch.ops.aten.index.Tensor: _index,
    torch.ops.aten.masked_select.default: _masked_select,
    unique: _unique,
    grouped_product: _grouped_mm,
}
