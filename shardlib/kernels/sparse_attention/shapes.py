"""Sizes of the Triton kernels' tiles, for 227 KB of shared memory and 64 K registers (H100, H200).

Each is the largest of those tried that compiles without spilling registers; none has been timed on a GPU.
"""

from __future__ import annotations

from typing import NamedTuple


class TileShape(NamedTuple):
    """The shape of a program's tile.

    Attributes:
        rows: of the tile: queries, or keys in the kernel for dK and dV; a multiple of the cell.
        step: rows gathered at a time; a multiple of the cell.
        cell: side of the cells that rows and steps consist of.
        chunk: numbers of a head that a product sums at a time.
        warps: of 32 threads.
        stages: steps that are loaded at once.
    """

    rows: int
    step: int
    cell: int
    chunk: int
    warps: int
    stages: int


def head_of(size: int) -> int:
    """The power of two that a head of ``size`` numbers is padded to."""
    return max(32, 1 << (size - 1).bit_length())


_CELL = 32  # larger ones save nothing
_Row = tuple[int, int, int, int, int]  # rows, step, chunk, warps, stages

# For 16-bit numbers, by padded head size: tiles without bias and dropout, then tiles with one of them; the largest first.
_HALF: dict[str, dict[int, tuple[tuple[_Row, ...], tuple[_Row, ...]]]] = {
    "forward": {
        32: (((128, 128, 32, 8, 3), (64, 64, 32, 4, 3)), ((128, 64, 32, 8, 3), (64, 64, 32, 4, 2))),
        64: (((128, 128, 64, 8, 3), (64, 64, 64, 4, 3)), ((128, 64, 64, 8, 3), (64, 64, 64, 4, 2))),
        128: (((128, 64, 128, 8, 3), (64, 64, 128, 4, 3)), ((64, 64, 128, 8, 2),)),
        256: (((128, 64, 256, 8, 3), (64, 32, 256, 8, 2)), ((64, 32, 256, 8, 2),)),
    },
    "query": {
        32: (((128, 64, 32, 8, 3), (64, 64, 32, 4, 3)), ((64, 32, 32, 4, 2),)),
        64: (((128, 128, 64, 8, 3), (64, 64, 64, 4, 3)), ((128, 64, 64, 8, 3), (64, 64, 64, 4, 2))),
        128: (((128, 64, 128, 8, 3), (64, 64, 128, 4, 3)), ((64, 32, 128, 8, 2),)),
        256: (((128, 32, 256, 8, 2), (64, 32, 256, 8, 2)), ((64, 32, 64, 8, 2),)),
    },
    "key": {
        32: (((128, 64, 32, 8, 2), (64, 64, 32, 4, 3)), ((64, 64, 32, 8, 2),)),
        64: (((128, 64, 64, 8, 2), (64, 64, 64, 4, 3)), ((64, 64, 64, 8, 2),)),
        128: (((128, 32, 128, 8, 2), (64, 32, 128, 8, 2)), ((64, 32, 64, 8, 2),)),
        256: (((64, 32, 64, 8, 2),), ((64, 32, 64, 8, 2),)),
    },
}
# For fp32; a product is three products of TF32.
_SINGLE: dict[str, dict[int, tuple[tuple[_Row, ...], tuple[_Row, ...]]]] = {
    "forward": {
        32: (((128, 64, 32, 8, 2),), ((64, 64, 32, 8, 2),)),
        64: (((64, 32, 64, 8, 2),), ((64, 32, 64, 8, 2),)),
        128: (((64, 32, 32, 8, 2),), ((64, 32, 32, 8, 2),)),
        256: (((64, 32, 32, 8, 1),), ((32, 32, 32, 8, 1),)),
    },
    "query": {
        32: (((64, 64, 32, 8, 2),), ((64, 32, 32, 8, 2),)),
        64: (((64, 64, 32, 8, 1),), ((64, 32, 32, 8, 2),)),
        128: (((32, 32, 32, 8, 1),), ((32, 32, 32, 8, 1),)),
        256: (((32, 32, 32, 8, 1),), ((32, 16, 32, 8, 1),)),
    },
    "key": {
        32: (((64, 32, 32, 4, 2),), ((64, 32, 32, 4, 2),)),
        64: (((64, 32, 32, 4, 1),), ((64, 32, 32, 4, 1),)),
        128: (((32, 32, 32, 8, 1),), ((32, 16, 32, 8, 1),)),
        256: (((32, 16, 32, 8, 1),), ((32, 16, 32, 8, 1),)),
    },
}


class TileShapes(NamedTuple):
    """The shape of whole tiles, and of tiles that hold a single long list, where there are few long lists."""

    whole: TileShape
    lone: TileShape


def choices(kernel: str, block: int, size: int, itemsize: int, rich: bool) -> list[TileShapes]:
    """The tiles to choose from, the largest first.

    Args:
        kernel: "forward", "query" (dQ) or "key" (dK and dV).
        block: of the layout.
        size: numbers of a head.
        itemsize: bytes of a number.
        rich: whether there is a bias or dropout.
    """
    table = _HALF if itemsize == 2 else _SINGLE
    made = []
    for rows, step, chunk, warps, stages in table[kernel][head_of(size)][rich]:
        whole = lone = TileShape(rows, step, min(block, rows, step, _CELL), chunk, warps, stages)
        if itemsize == 2 and head_of(size) <= 128:  # other small tiles spill registers
            lone = TileShape(whole.cell, step, whole.cell, min(chunk, 64), 4, 2)
        made.append(TileShapes(whole, lone))
    return made


def diagonal_choice(block: int, size: int, itemsize: int) -> TileShapes:
    """The tile of the kernel for the bias."""
    cell = min(block, _CELL if itemsize == 2 else 16)
    shape = TileShape(cell, 64, cell, min(head_of(size), 32), 4, 1)
    return TileShapes(shape, shape)
