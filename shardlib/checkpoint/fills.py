"""`Fill`: what a restore reads into one fragment of a state. A restore is a list of fills, made before anything is read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from shardlib.checkpoint.fragments import Fragment
from shardlib.checkpoint.reading import BUFFER, TensorsOnDisk
from shardlib.common._compat import storage_id
from shardlib.optim.base import Packed


class Fill(NamedTuple):
    """A fragment, and the saved tensors whose weighted sum it is to hold.

    Attributes:
        fragment: the elements to fill. On the meta device, if they are not consecutive in the state.
        sources: names and weights of saved tensors. Elements that a tensor lacks count as zero, except in the only tensor
            with weight 1, which leaves them as they are.
        into: the tensor of the state whose elements, in order, are the fragment's and then padding; None if the fragment is
            itself a view of the state.
    """

    fragment: Fragment
    sources: tuple[tuple[str, float], ...]
    into: torch.Tensor | None = None

    def bytes(self, saved: TensorsOnDisk) -> int:
        """Bytes that `run` reads."""
        parts = self._parts()
        return sum(each.bytes for part in parts for name, _ in self.sources for each in saved.transfers(part, name))

    def run(self, saved: TensorsOnDisk) -> None:
        if self.into is None:
            self._fill(self.fragment, saved)
            return
        flat = torch.zeros(self.into.numel(), dtype=self.into.dtype)
        self._fill(self.fragment._replace(data=flat[: self.fragment.data.numel()]), saved)
        self.into.copy_(flat.view(self.into.shape))

    def _fill(self, fragment: Fragment, saved: TensorsOnDisk) -> None:
        if self._plain:
            saved.fill(fragment, self.sources[0][0])
            return
        for part in self._parts(fragment):
            total = torch.zeros(part.data.numel(), dtype=torch.float64)
            for name, weight in self.sources:
                held = torch.zeros(part.data.numel(), dtype=part.data.dtype)
                saved.fill(part._replace(data=held), name)
                total.add_(held, alpha=weight)
            part.data.copy_(total)

    @property
    def _plain(self) -> bool:
        return len(self.sources) == 1 and self.sources[0][1] == 1

    def _parts(self, fragment: Fragment | None = None) -> list[Fragment]:
        """The fragments that are filled one at a time: a sum needs memory beside the state."""
        fragment = fragment or self.fragment
        return [fragment] if self._plain else list(fragment.parts(max(1, BUFFER() // 32)))


def joined(fills: Iterable[Fill], packed: Mapping[int, Packed]) -> Iterator[Fill | PackedFill]:
    """The fills, those of each packed tensor together.

    Args:
        packed: storage of a tensor without memory -> what it stands for.
    """
    of_packed: dict[int, list[Fill]] = {}
    for fill in fills:
        storage = storage_id(fill.fragment.data.untyped_storage())
        if storage in packed:
            of_packed.setdefault(storage, []).append(fill)
        else:
            yield fill
    yield from (PackedFill(packed[storage], some) for storage, some in of_packed.items())


class PackedFill(NamedTuple):
    """The fills of one packed tensor, whose fragments are views of a tensor without memory. It is decoded, filled and encoded
    a part at a time."""

    node: Packed
    fills: Sequence[Fill]

    def bytes(self, saved: TensorsOnDisk) -> int:
        """Bytes that `run` reads."""
        parts = ((first, torch.empty(stop - first, device="meta")) for first, stop in self._parts())
        return sum(fill.bytes(saved) for first, values in parts for fill in self._within(first, values))

    def run(self, saved: TensorsOnDisk) -> None:
        for first, stop in self._parts():
            values = self.node.part(first, stop)
            for fill in self._within(first, values):
                fill.run(saved)
            self.node.pack(values, first)

    def _parts(self) -> Iterator[tuple[int, int]]:
        """First and last index of each part."""
        size, block = self.node.like.numel(), self.node.block
        # Decoding and encoding take some ten tensors of a part's size, which allocators may give back late.
        step = max(block, BUFFER() // 256 // block * block)
        for first in range(0, size, step):
            yield first, min(first + step, size)

    def _within(self, first: int, values: torch.Tensor) -> Iterator[Fill]:
        """What fills a part, which begins at element ``first`` and is held by ``values``."""
        for fill in self.fills:
            begin = int(fill.fragment.data.storage_offset())
            low, high = max(first, begin), min(first + values.numel(), begin + fill.fragment.data.numel())
            if low < high:
                part = fill.fragment.part(low - begin, high - begin)
                yield fill._replace(fragment=part._replace(data=values[low - first : high - first]))
