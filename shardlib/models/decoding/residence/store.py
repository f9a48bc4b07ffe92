"""`LayerStore`: brings a layer's experts to the device as its tokens need them, and those that the next layer may need."""

from __future__ import annotations

import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from shardlib.common.devices import pins
from shardlib.common.pages import pages
from shardlib.kernels.thin_matmul import QuantizedMatrix
from shardlib.mesh.transfers import Transfer, Transfers
from shardlib.nn.moe.compute import ExpertStore
from shardlib.tree import flatten, unflatten

# `Tally`: what was counted of experts that come to the device.


@dataclass(frozen=True)
class Tally:
    """Numbers of experts, counted once for each layer and step that uses them.

    Attributes:
        used: experts that had tokens.
        misses: those of them that were neither on the device nor on their way when their layer began.
        ahead: experts that were fetched ahead, because the router of the layer before named them.
        right: those of them that their layer then used.
        bytes: of all that were fetched.
    """

    used: int = 0
    misses: int = 0
    ahead: int = 0
    right: int = 0
    bytes: int = 0

    @property
    def hits(self) -> int:
        """Experts with tokens that were on the device, or on their way."""
        return self.used - self.misses

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.used + other.used,
            self.misses + other.misses,
            self.ahead + other.ahead,
            self.right + other.right,
            self.bytes + other.bytes,
        )


# `ExpertCache`: room on the device for a few experts of a layer, whose leaves are in host memory.


class _Slot(NamedTuple):
    """A slot that an expert has, or is on its way to."""

    number: int
    coming: Transfer


class _Leaf:
    """A leaf of a layer's experts in host memory, and its slots on the device."""

    def __init__(self, leaf: torch.Tensor | QuantizedMatrix, slots: int, device: torch.device) -> None:
        self._quantized = leaf if isinstance(leaf, QuantizedMatrix) else None
        parts = leaf.by_expert if isinstance(leaf, QuantizedMatrix) else (leaf,)
        self.parts = [_in_pages(part, device) for part in parts]
        self.room = [torch.empty((slots, *part.shape[1:]), dtype=part.dtype, device=device) for part in parts]

    def copy(self, expert: int, slot: int) -> None:
        for part, room in zip(self.parts, self.room, strict=True):
            room[slot].copy_(part[expert], non_blocking=True)

    def at(self, slot: int) -> torch.Tensor | QuantizedMatrix:
        """The leaf of the expert in a slot, ``[1, …]``."""
        if self._quantized is None:
            return self.room[0][slot : slot + 1]
        values, scales = (room[slot] for room in self.room)
        shape = torch.Size((1, *self._quantized.shape[1:]))
        return replace(self._quantized, values=values, scales=scales, shape=shape)


class ExpertCache:
    """Room on the device for ``number`` experts of one layer. Where there is none left, the least recently used one leaves.

    Args:
        leaves: of the layer's experts, each with the experts along dimension 0.

    Attributes:
        size: bytes of one expert.
        bytes: of all slots.
    """

    def __init__(
        self, leaves: Sequence[torch.Tensor | QuantizedMatrix], number: int, transfers: Transfers, device: torch.device
    ) -> None:
        self.number, self._transfers = number, transfers
        self._taken: OrderedDict[int, _Slot] = OrderedDict()  # expert -> its slot, the least recently used one first
        self._leaves = [_Leaf(leaf, number, device) for leaf in leaves]
        self.size = sum(part[0].nbytes for leaf in self._leaves for part in leaf.parts)
        self.bytes = number * self.size
        self._free = list(range(number))

    def __iter__(self) -> Iterator[int]:
        """The experts that are here or on their way."""
        return iter([*self._taken])

    def __contains__(self, expert: int) -> bool:
        return expert in self._taken

    def fetch(self, expert: int, keep: Collection[int]) -> bool:
        """Start to bring an expert that is not here to a slot; False if all have experts to ``keep``."""
        if self._free:
            slot = self._free.pop()
        else:
            leaving = next((held for held in self._taken if held not in keep), None)
            if leaving is None:
                return False
            slot = self._taken.pop(leaving).number

        def copies() -> None:
            for leaf in self._leaves:
                leaf.copy(expert, slot)

        # A copy waits for what the device was given before: for all that reads the slot.
        self._taken[expert] = _Slot(slot, self._transfers.start("up", copies))
        return True

    def use(self, expert: int) -> list[Any]:
        """The leaves of an expert that is here or on its way. What the device is given next waits for it."""
        slot = self._taken[expert]
        slot.coming.join()
        self._taken.move_to_end(expert)
        return [leaf.at(slot.number) for leaf in self._leaves]

    def __del__(self) -> None:
        # The memory goes back when this returns, so no copy may write to it: a wrong guess may still be under way.
        if not sys.is_finalizing():
            for slot in self._taken.values():
                slot.coming.wait()


def _in_pages(part: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``part`` in host memory from which copies to ``device`` run beside other work; itself if it is there."""
    if part.device.type == "cpu" and part.is_contiguous() and (not pins(device) or part.is_pinned()):
        return part.detach()
    kept = pages(part.nbytes, pinned=pins(device)).view(part.dtype).view(part.shape)
    return kept.copy_(part.detach())


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
