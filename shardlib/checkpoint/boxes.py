"""Boxes: a range of a flattened slice as hyper-rectangles of the whole tensor, which other layouts can be compared with.

A box is a `Window`. A flat chunk of a tensor with N dimensions is at most 2N−1 boxes, each contiguous in the chunk.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

from shardlib.mesh.specs import Window


def boxes(window: Window, start: int, stop: int) -> list[Window]:
    """The boxes that hold elements ``start`` to ``stop`` of a flattened slice, in the order of the elements."""
    return [
        Window(window.shape, tuple(map(sum, zip(window.first, first, strict=True))), sizes)
        for first, sizes in _rectangles(window.sizes, start, stop)
    ]


def _rectangles(sizes: tuple[int, ...], start: int, stop: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """First index and size in each dimension of the rectangles of a range."""
    if start >= stop:
        return []
    if not sizes:
        return [((), ())]
    inner = sizes[1:]
    row = math.prod(inner)
    first, last = -(-start // row), stop // row  # the whole rows
    if first > last:  # the range lies inside one row
        return [((last, *at), (1, *size)) for at, size in _rectangles(inner, start - last * row, stop - last * row)]
    head = [((first - 1, *at), (1, *size)) for at, size in _rectangles(inner, start % row, row)] if start % row else []
    whole = [((first, *(0 for _ in inner)), (last - first, *inner))] if first < last else []
    tail = [((last, *at), (1, *size)) for at, size in _rectangles(inner, 0, stop % row)]
    return head + whole + tail


class Runs(NamedTuple):
    """The elements of a box inside another one's memory: runs of equal length.

    Attributes:
        length: elements of a run.
        ranges: the indices of the runs' first elements in the flattened outer box, as sums of one number of each range.
    """

    length: int
    ranges: tuple[range, ...]

    def starts(self) -> Iterator[int]:
        """The index of each run's first element in the flattened outer box."""
        return (sum(at) for at in itertools.product(*self.ranges))


def runs(inner: Window, outer: Window) -> Runs:
    """The runs of ``inner``, which lies in ``outer``, in the memory of ``outer``, in order."""
    length, stride, whole = 1, 1, True
    ranges: list[range] = []
    for at, size, first, extent in reversed(list(zip(inner.first, inner.sizes, outer.first, outer.sizes, strict=True))):
        begin = (at - first) * stride
        if whole:  # all dimensions so far are covered from end to end, so the elements of this one follow each other
            length, ranges = length * size, [range(begin, begin + 1), *ranges]
        else:
            ranges = [range(begin, begin + size * stride, stride), *ranges]
        whole = whole and size == extent
        stride *= extent
    return Runs(length, tuple(ranges))
