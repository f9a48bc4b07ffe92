"""`LayerStore`: brings a layer's experts to the device as its tokens need them, and those that the next layer may need."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from shardlib.models.decoding.residence.slots import ExpertCache
from shardlib.models.decoding.residence.tally import Tally
from shardlib.nn.moe.stored import ExpertStore
from shardlib.tree import flatten, unflatten


class NextLayer(NamedTuple):
    """The next layer, and a guess of what it will choose.

    Attributes:
        choices: ``choices(x)``: the experts that its router chooses for rows ``[T, W]``, int64 ``[T, k]``, −1 for none.
    """

    store: LayerStore
    choices: Callable[[torch.Tensor], torch.Tensor]


class LayerStore(ExpertStore):
    """The experts of one layer.

    A layer's experts that are there compute while those that are missing come; then the ones that the next layer may need
    follow, by its router's choices for this layer's inputs (arXiv 2312.17238, section 3.2). Where a layer needs more experts
    than there are slots, each comes once, as soon as another has computed.

    Args:
        slots: room for the layer's experts, which are numbered from 0 on.
        first: the number of the first of them among all ranks' experts.
        number: of them.

    Attributes:
        ahead: the layer to fetch for; None in the last one.
        tally: what was counted so far.
        bytes: of the slots.
    """

    def __init__(self, slots: ExpertCache, first: int, number: int) -> None:
        self._slots, self._first, self._number = slots, first, number
        self.ahead: NextLayer | None = None
        self.tally, self.bytes = Tally(), slots.bytes
        self._guessed: torch.Tensor | None = None
        self._early: set[int] = set()  # experts that were fetched ahead of this layer's next run

    def expect(self, x: torch.Tensor) -> None:
        self._guessed = None if self.ahead is None else self.ahead.store.counts(self.ahead.choices(x))

    def counts(self, choices: torch.Tensor) -> torch.Tensor:
        """How often each of this layer's experts is among the choices, int64 ``[E]``."""
        local = choices.flatten() - self._first
        local = local.where((local >= 0) & (local < self._number), self._number)
        return local.new_zeros(self._number + 1).scatter_add_(0, local, torch.ones_like(local))[:-1]

    def each(self, params: Mapping[str, Any], ends: torch.Tensor) -> Iterator[tuple[slice, Mapping[str, Any]]]:
        ranges, likely = self._read(ends)
        here = [expert for expert in self._slots if expert in ranges]
        missing = deque(expert for expert in ranges if expert not in self._slots)
        self.tally += Tally(len(ranges), len(missing), 0, len(self._early & {*ranges}), len(missing) * self._slots.size)
        self._early.clear()
        left, treedef = {*ranges}, flatten(params)[2]
        for expert in [*here, *missing]:
            while missing and self._slots.fetch(missing[0], keep=left):
                missing.popleft()
            if not missing and self.ahead is not None and likely:
                self.ahead.store.fetch_ahead(likely)
                likely = []
            yield ranges[expert], unflatten(treedef, self._slots.use(expert))
            left.discard(expert)

    def _read(self, ends: torch.Tensor) -> tuple[dict[int, slice], Sequence[int]]:
        """The rows of each expert that has any, and the counts of the next layer's, in one synchronisation."""
        guessed, self._guessed = self._guessed, None
        numbers = (ends if guessed is None else torch.cat([ends, guessed])).tolist()
        starts = [0, *numbers[: len(ends)]]
        ranges = {expert: slice(*starts[expert : expert + 2]) for expert in range(len(ends))}
        with_rows = {expert: rows for expert, rows in ranges.items() if rows.start < rows.stop}
        return with_rows or {next(iter(self._slots), 0): slice(0, 0)}, numbers[len(ends) :]

    def fetch_ahead(self, likely: Sequence[int]) -> None:
        """Fetch the experts with the largest of the counts ``likely``, as many as there is room for."""
        named = sorted((expert for expert, count in enumerate(likely) if count), key=lambda expert: -likely[expert])
        named = named[: self._slots.number]
        for expert in named:
            if expert not in self._slots and self._slots.fetch(expert, keep=named):
                self._early.add(expert)
                self.tally += Tally(ahead=1, bytes=self._slots.size)
