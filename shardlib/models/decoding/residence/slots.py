"""`ExpertCache`: room on the device for a few experts of a layer, whose leaves are in host memory."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from shardlib.common.devices import pins
from shardlib.common.pages import pages
from shardlib.kernels.thin_matmul import QuantizedMatrix
from shardlib.mesh.transfers import Transfer, Transfers


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
