"""The segments of a flat buffer whose elements share a scale."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import torch


class Segments:
    """A flat buffer of ``length`` elements cut into ``count`` consecutive segments with one scale each, then padding.

    Segment j holds the elements from ``offsets[j]`` up to ``offsets[j + 1]``; it may be empty, and may begin at any
    element. Elements from ``offsets[-1]`` (``elements``) on are padding, so that the buffer divides over ranks.

    Args:
        offsets: ``count + 1`` ascending integers from 0.
        length: of the buffer with its padding, in elements; ``offsets[-1]`` by default.

    Raises:
        ValueError: offsets do not ascend from 0, or ``length`` is too small.
    """

    elements: int
    length: int
    count: int
    block: int | None

    def __init__(self, offsets: Sequence[int] | torch.Tensor, length: int | None = None) -> None:
        table = torch.as_tensor(offsets, dtype=torch.int64, device="cpu").contiguous()
        if table.dim() != 1 or len(table) == 0 or table[0] != 0 or bool((table.diff() < 0).any()):
            raise ValueError(
                f"offsets of segments must ascend from 0, not {table.tolist()}: sum up the segments' sizes"
            )
        self._set(int(table[-1]), length, len(table) - 1, None)
        self.__dict__["offsets"] = table

    @classmethod
    def blocks(cls, block: int, elements: int, length: int | None = None) -> Segments:
        """Equal segments of ``block`` elements, a multiple of 8; the last may be shorter.

        ``count`` is ``length`` / ``block`` rounded up: it includes blocks that are all padding, so that ranks with chunks
        of one size have the same number of scales.
        """
        if block < 8 or block % 8:
            raise ValueError(
                f"blocks of {block} elements: a block must be a multiple of 8, so that bytes hold one scale"
            )
        segments = cls.__new__(cls)
        segments._set(elements, length, -(-(elements if length is None else length) // block), block)
        return segments

    def _set(self, elements: int, length: int | None, count: int, block: int | None) -> None:
        self.elements, self.length = elements, elements if length is None else length
        self.count, self.block = count, block
        self._kept: dict[tuple[str | int, torch.device], torch.Tensor] = {}
        if not 0 <= self.elements <= self.length:
            raise ValueError(f"{elements} elements in segments do not fit a buffer of {length}: pad the buffer")

    @cached_property
    def offsets(self) -> torch.Tensor:
        """int64 ``[count + 1]`` on the CPU."""
        assert self.block is not None
        return torch.arange(self.count + 1).mul_(self.block).clamp_(max=self.elements)

    @property
    def bytes(self) -> int:
        """Bytes of the packed signs."""
        return -(-self.length // 8)

    def between(self, start: int, stop: int) -> Segments:
        """The segments of the buffer's elements from ``start`` up to ``stop``; `scales_of` gives their scales.

        Segments are cut at both ends. With offsets, ``count`` stays: segments outside are empty. Blocks keep their size,
        so ``start`` must be a multiple of it.
        """
        if not 0 <= start <= stop <= self.length:
            raise ValueError(f"no elements from {start} up to {stop} in a buffer of {self.length}")
        if self.block is None:
            return Segments((self.offsets.clamp(start, stop) - start), stop - start)
        if start % self.block:
            raise ValueError(
                f"a range from {start} cuts a block of {self.block}: pad chunks to a multiple of the block"
            )
        return Segments.blocks(self.block, min(max(self.elements - start, 0), stop - start), stop - start)

    def scales_of(self, start: int, stop: int) -> slice:
        """The positions of the scales of ``between(start, stop)`` among the scales of these segments."""
        if self.block is None:
            return slice(0, self.count)
        return slice(start // self.block, -(-stop // self.block))

    def split(self, ranks: int) -> Segments:
        """The segments of the whole buffer after it was compressed in ``ranks`` equal chunks.

        Scales are those of the chunks in order: ``ranks * count`` for offsets, ``count`` for blocks.
        """
        if self.length % ranks:
            raise ValueError(f"{self.length} elements do not divide over {ranks} ranks: pad the buffer")
        chunk = self.length // ranks
        if self.block is not None:
            if chunk % self.block:
                raise ValueError(f"chunks of {chunk} cut blocks of {self.block}: pad chunks to a multiple of the block")
            return self
        starts = torch.arange(ranks).mul_(chunk).unsqueeze(1)
        cut = self.offsets[:-1].clamp(starts, starts + chunk).clamp_(max=self.elements).flatten()
        return Segments(torch.cat([cut, self.offsets[-1:]]), self.length)

    def spread(self, scales: torch.Tensor) -> torch.Tensor:
        """The scale of every element, ``[..., length]``, 0 in the padding, from ``scales``, ``[..., count]``."""
        sizes = self.on(scales.device).diff()
        padding = scales.new_zeros((*scales.shape[:-1], self.length - self.elements))
        return torch.cat([scales.repeat_interleave(sizes, dim=-1, output_size=self.elements), padding], dim=-1)

    def on(self, device: torch.device) -> torch.Tensor:
        """The offsets on ``device``."""
        return self._keep("offsets", device, lambda: self.offsets)

    def first(self, tile: int, device: torch.device) -> torch.Tensor:
        """The first segment of every tile of ``tile`` elements, int64 ``[tiles + 1]`` on ``device``.

        Tile t has elements of the segments from number ``first[t]`` to number ``first[t + 1]`` at most.
        """

        def make() -> torch.Tensor:
            starts = torch.arange(-(-self.length // tile) + 1).mul_(tile).clamp_(max=max(self.elements - 1, 0))
            return (torch.searchsorted(self.offsets, starts, right=True) - 1).clamp_(0, max(self.count - 1, 0))

        return self._keep(tile, device, make)

    def _keep(self, key: str | int, device: torch.device, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        if (key, device) not in self._kept:
            self._kept[key, device] = make().to(device)
        return self._kept[key, device]
