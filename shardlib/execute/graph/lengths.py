"""The sizes and strides of a graph's inputs, of which those that change from batch to batch are symbols."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from shardlib.common._compat import fakes_of_unknown_sizes, number_at, symbol, values_for


class InputLayout(NamedTuple):
    """How an input lies in memory: its path in a tree, its sizes and its strides."""

    path: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


class Lengths:
    """Sizes and strides in a trace. Those that were the same in all batches so far are numbers; those that changed alike are
    one symbol, with which the trace computes. What it asks of symbols, it asks of the batch that it is made for, and the
    graph is for all batches of which the answers are the same.

    Args:
        known: the layouts of each batch so far, of as many tensors with as many dimensions; the trace is of the last one.

    Attributes:
        mode: of the trace's fake tensors.
        vary: whether there are symbols.
    """

    def __init__(self, known: Sequence[tuple[InputLayout, ...]]) -> None:
        self.mode = fakes_of_unknown_sizes()
        self._symbols: dict[tuple[int, ...], Any] = {}  # by what each was in the batches so far
        self._values: dict[tuple[int, ...], dict[Any, int] | None] = {}  # by the numbers of a batch
        self._made = [self._of_tensor(layouts) for layouts in zip(*known)]
        self.vary = bool(self._symbols)

    def _of_tensor(self, layouts: Sequence[InputLayout]) -> InputLayout:
        sizes = tuple(map(self._number, zip(*(layout.sizes for layout in layouts))))
        strides: dict[int, Any] = {}
        for place in sorted(range(len(sizes)), key=lambda place: (layouts[-1].strides[place], -place)):
            strides[place] = self._stride(place, layouts, sizes, strides)
        return InputLayout(layouts[-1].path, sizes, tuple(strides[place] for place in range(len(sizes))))

    def _number(self, seen: tuple[int, ...]) -> Any:
        """A number of the trace, which was ``seen`` in the batches so far."""
        if len(set(seen)) == 1 or seen[-1] < 2:  # torch treats 0 and 1 in ways of their own
            return seen[-1]
        if seen not in self._symbols:
            self._symbols[seen] = symbol(self.mode, seen[-1], f"length_{len(self._symbols)}")
        return self._symbols[seen]

    def _stride(
        self, place: int, layouts: Sequence[InputLayout], sizes: Sequence[Any], strides: Mapping[int, Any]
    ) -> Any:
        """A stride: where it always was the product of another dimension's size and stride, as in whole memory, that."""
        seen = tuple(layout.strides[place] for layout in layouts)
        if len(set(seen)) > 1:
            for other, stride in strides.items():
                if all(now == one.sizes[other] * one.strides[other] for now, one in zip(seen, layouts)):
                    return sizes[other] * stride
        return self._number(seen)

    def fake(self, tensor: torch.Tensor, number: int) -> torch.Tensor:
        """A fake tensor in the place of the ``number``-th one of a batch, while `mode` is active."""
        _, sizes, strides = self._made[number]
        if all(type(each) is int for each in (*sizes, *strides)):
            return self.mode.from_tensor(tensor)
        made = torch.empty_strided(sizes, strides, dtype=tensor.dtype, device=tensor.device)
        return made.requires_grad_(tensor.requires_grad)

    def give(self, expression: Any) -> bool:
        """Whether an expression is known from a batch."""
        return expression.free_symbols.issubset(each.node._expr for each in self._symbols.values())

    def values(self, layouts: tuple[InputLayout, ...]) -> dict[Any, int] | None:
        """What each symbol is in a batch; None if the graph is not for it."""
        now = _numbers(layouts)
        if now not in self._values:
            self._values[now] = self._compared(now)
        return self._values[now]

    def _compared(self, now: tuple[int, ...]) -> dict[Any, int] | None:
        made = _numbers(self._made)
        symbols = list(self._symbols.values())
        numbers = [next(number for number, each in zip(now, made) if each is length) for length in symbols]
        if min(numbers, default=2) < 2 or (values := values_for(symbols, numbers)) is None:
            return None
        return values if all(number_at(each, values) == number for each, number in zip(made, now)) else None


def _numbers(layouts: Sequence[InputLayout]) -> tuple[Any, ...]:
    return tuple(number for layout in layouts for number in (*layout.sizes, *layout.strides))
