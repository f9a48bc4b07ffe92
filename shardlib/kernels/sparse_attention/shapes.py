"""How large the Triton kernels' tiles are, for 227 KB of shared memory and 64 K registers (H100, H200).

Each is the largest of those tried that compiles without spilled registers; none has been timed on a GPU.
"""

from __future__ import annotations

from typing import NamedTuple


class Shape(NamedTuple):
    """A program's tile.

    Attributes:
        rows: of the tile itself: queries, or keys in the kernel for dK and dV; a multiple of the cell.
        step: rows gathered at a time; a multiple of the cell.
        cell: side of the blocks that both are made of.
        piece: how much of a head a product over it takes at a time.
        warps: of 32 threads.
        stages: steps whose loads are under way at once.
    """

    rows: int
    step: int
    cell: int
    piece: int
    warps: int
    stages: int


def head_of(size: int) -> int:
    """The power of two that a head of ``size`` numbers is padded to."""
    return max(32, 1 << (size - 1).bit_length())


_CELL = 32  # larger ones save nothing
_Row = tuple[int, int, int, int, int]  # rows, step, piece, warps, stages

# For 16-bit numbers and by padded head size: without bias and dropout a large tile and a small one, with them one.
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
# For fp32, whose products are three of TF32 each.
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


class Choice(NamedTuple):
    """The shape of whole tiles, and that of tiles of a single long list, where there are few of these."""

    whole: Shape
    lone: Shape


def choices(kernel: str, block: int, size: int, itemsize: int, rich: bool) -> list[Choice]:
    """The tiles to choose from, the larger first.

    Args:
        kernel: "forward", "query" (dQ) or "key" (dK and dV).
        block: of the layout.
        size: numbers of a head.
        itemsize: bytes of a number.
        rich: there is a bias, or dropout.
    """
    table = _HALF if itemsize == 2 else _SINGLE
    made = []
    for rows, step, piece, warps, stages in table[kernel][head_of(size)][rich]:
        whole = lone = Shape(rows, step, min(block, rows, step, _CELL), piece, warps, stages)
        if itemsize == 2 and head_of(size) <= 128:  # else a small tile spills
            lone = Shape(whole.cell, step, whole.cell, min(piece, 64), 4, 2)
        made.append(Choice(whole, lone))
    return made


def diagonal_choice(block: int, size: int, itemsize: int) -> Choice:
    """That of the kernel for the bias: as many cells at a time as there are warps."""
    cell = min(block, _CELL if itemsize == 2 else 16)
    shape = Shape(cell, 64, cell, min(head_of(size), 32), 4, 1)
    return Choice(shape, shape)
