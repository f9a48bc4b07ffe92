"""Dimensions of tensors, followed through the functions that keep them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from shardlib.common._compat import estimated
from shardlib.execute.along import MOVES, NUMBER_BY_NUMBER, TOGETHER, Grouping, grouped, name_of
from shardlib.execute.slicing import SlicedHandle


class Mark(NamedTuple):
    """What a dimension of a tensor is.

    Attributes:
        of: what this rank has a part of along it, by name.
        dim: counted from the end.
        groups: whether it counts groups, such as heads, and what follows it the elements of each.
    """

    of: str
    dim: int = -1
    groups: bool = False


class Following(ABC):
    """Marks of tensors, and of what activations, views, products and the like make of them. A subclass says where marks come
    from, and what is refused."""

    def __init__(self) -> None:
        self._known: MutableMapping[torch.Tensor, Mark] = WeakTensorKeyDictionary()

    @abstractmethod
    def _begins(self, x: torch.Tensor) -> Mark | None:
        """The mark of a tensor that no function was seen to make of marked ones."""

    @abstractmethod
    def _refuse(self, mark: Mark, func: Any, x: torch.Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Raise if a call with a marked tensor as its first argument is wrong."""

    @abstractmethod
    def _grouped(self, mark: Mark, x: torch.Tensor, result: torch.Tensor, group: Grouping) -> Mark | None:
        """The mark of a tensor in another shape. It may be refused."""

    def mark_of(self, x: Any) -> Mark | None:
        """The mark of a tensor, if it has one. One without elements has none."""
        if not isinstance(x, torch.Tensor) or not estimated(x.numel()):
            return None
        return self._known.get(x) or self._begins(x)

    def look(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Callable[[Any], None] | None:
        """Look at a call before it is made; returns what is to be given its result, if anything.

        Raises:
            ShardError: it is refused.
        """
        marks = [mark for x in (*args, *kwargs.values()) if (mark := self.mark_of(x))]
        if not marks or (func in TOGETHER and any(isinstance(x, SlicedHandle) for x in (*args, *kwargs.values()))):
            return None  # or a sliced layer, which takes a part up
        first = self.mark_of(args[0]) if args else None
        if first is not None:
            self._refuse(first, func, args[0], args[1:], kwargs)

        def follow(result: Any) -> None:
            if not isinstance(result, torch.Tensor) or isinstance(result, SlicedHandle):
                return
            if name_of(func) in NUMBER_BY_NUMBER:
                found: Mark | None = marks[0]
            else:
                found = self._moved(first, func, args[0], args[1:], kwargs, result) if first is not None else None
            if found is not None and found.dim >= -result.dim():
                self._known[result] = found

        return follow

    def _moved(
        self,
        mark: Mark,
        func: Any,
        x: torch.Tensor,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        result: torch.Tensor,
    ) -> Mark | None:
        """The mark of what a function makes of a marked tensor."""
        if func in MOVES:
            dim = asked(MOVES[func], x, mark.dim, *args, **kwargs)
            return None if dim is None else mark._replace(dim=dim)
        if func in TOGETHER:  # of other dimensions
            return mark if result.shape == x.shape else None
        group = grouped(func, x, mark.dim, args, result)
        return None if group is None else self._grouped(mark, x, result, group)


def asked(what: Callable[..., Any], x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """What a call does, or None where its arguments have names that the table does not know."""
    try:
        return what(x, *args, **kwargs)
    except TypeError:
        return None
