"""The usual patterns of block-sparse attention, made row by row in compressed form.

A row's blocks are a union of intervals of columns. Some thousand rows are made at a time, so that making a pattern needs
little more memory than the result.

Sources: sparse transformers (Child et al., arXiv 1904.10509), BigBird (Zaheer et al., arXiv 2007.14062) and Longformer
(Beltagy et al., arXiv 2004.05150), in the block forms that DeepSpeed made common, with the same defaults. Lengths are in
positions, all other sizes in blocks. With ``causal`` the layout is causal: no block lies above the diagonal, and attention
masks inside the blocks on the diagonal. ``heads`` is the number of heads of the layout; a layout of 1 head serves any number.
Windows around the diagonal have an odd number of blocks, equally many on either side, and are cut off at the ends of the
sequence.

Every pattern raises ValueError for sizes out of range, and TypeError for sizes that are not integers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence

import torch

from shardlib.common.thresholds import Threshold
from shardlib.kernels.counter import random_bits
from shardlib.rng import Key
from shardlib.sparse.layout import Layout, offsets_of

_COLUMNS = Threshold(1 << 22)  # columns of intervals that are written out at a time

# Rows, and for each an interval of columns: the first, and the last + 1.
Intervals = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
# Rows -> several families of intervals, whose union each row sees.
Pattern = Callable[[torch.Tensor], Iterator[Intervals]]


def dense(length: int, *, block: int = 16, causal: bool = False) -> Layout:
    """All blocks.

    >>> sl.sparse.dense(256).density
    1.0
    """
    size = _size(length, block)

    def pattern(rows: torch.Tensor) -> Iterator[Intervals]:
        yield _whole(rows, size)

    return _layout(size, block, causal, [pattern])


def fixed(
    length: int,
    *,
    block: int = 16,
    causal: bool = False,
    heads: int = 1,
    local: int = 4,
    global_blocks: int = 1,
    patterns: int = 1,
    horizontal: bool = False,
) -> Layout:
    """Windows of ``local`` blocks side by side, and ``global_blocks`` columns of each window that all rows see.

    Args:
        local: blocks per window: a multiple of ``global_blocks``.
        global_blocks: global columns per window. For head h they end (h % patterns) · global_blocks blocks before the
            window's end. A shorter last window has them at the same offset from its start, or at its end where it is too
            short.
        patterns: the number of different choices of global columns among the heads.
        horizontal: whether the rows of global blocks also see everything; not with ``causal``.

    >>> sl.sparse.fixed(256, local=4, causal=True).size
    16
    """
    size = _size(length, block)
    _check(heads=(heads, 1), local=(local, 1), global_blocks=(global_blocks, 1), patterns=(patterns, 1))
    if local < global_blocks or local % global_blocks:
        raise ValueError(f"local={local} must be a multiple of global_blocks={global_blocks}")
    if patterns > local // global_blocks:
        raise ValueError(f"patterns={patterns}: from 1 to local // global_blocks = {local // global_blocks}")
    if patterns > 1 and heads < patterns:
        raise ValueError(f"patterns={patterns} needs at least as many heads, and heads={heads}: pass heads")
    if horizontal and causal:
        raise ValueError("horizontal=True lets rows see later columns: leave causal out, or horizontal")

    def of(number: int) -> Pattern:
        first, whole = local - (1 + number) * global_blocks, size - size % local
        starts = torch.arange(first, max(first, whole), local)
        if size % local:
            starts = torch.cat([starts, torch.tensor([max(0, min(whole + first, size - global_blocks))])])

        def pattern(rows: torch.Tensor) -> Iterator[Intervals]:
            window = rows // local * local
            yield rows, window, window + local
            yield _crossed(rows, starts, starts + global_blocks)
            if horizontal:
                yield _whole(_inside(rows, starts, starts + global_blocks), size)

        return pattern

    return _layout(size, block, causal, [of(number) for number in range(patterns)], heads)


def variable(
    length: int,
    *,
    block: int = 16,
    causal: bool = False,
    heads: int = 1,
    random: int = 0,
    windows: Sequence[int] = (4,),
    global_blocks: Sequence[int] = (0,),
    global_ends: Sequence[int] | None = None,
    horizontal: bool = False,
    seed: int = 0,
) -> Layout:
    """Windows of several sizes, given global blocks, and random blocks.

    Args:
        random: further blocks of every row, drawn by ``seed``, anew for each head.
        windows: the sizes of consecutive windows; the last repeats.
        global_blocks: the first columns of runs that all rows see. Columns beyond the sequence are left out.
        global_ends: the last + 1 column of each of these runs; by default each run is one column.
        horizontal: whether the rows of global blocks also see everything; not with ``causal``.
        seed: of the random blocks.

    >>> sl.sparse.variable(256, windows=(2, 4), random=1).size
    16
    """
    size = _size(length, block)
    _check(heads=(heads, 1), random=(random, 0))
    if isinstance(windows, int) or not windows:
        raise ValueError(f"windows={windows!r}: pass a list of at least one size, such as (4,)")
    _check(**{f"windows[{number}]": (window, 1) for number, window in enumerate(windows)})
    if horizontal and causal:
        raise ValueError("horizontal=True lets rows see later columns: leave causal out, or horizontal")
    low, high = _spans(global_blocks, global_ends)
    borders = torch.tensor([0, *windows]).cumsum(0)

    def of(head: int) -> Pattern:
        def pattern(rows: torch.Tensor) -> Iterator[Intervals]:
            number = torch.searchsorted(borders, rows, right=True) - 1
            repeats = rows - (rows - borders[-1]) % windows[-1]
            start = torch.where(rows >= borders[-1], repeats, borders[number])
            end = torch.where(rows >= borders[-1], repeats + windows[-1], borders[(number + 1).clamp(max=len(windows))])
            yield rows, start, end
            yield _crossed(rows, low, high)
            if horizontal:
                yield _whole(_inside(rows, low, high), size)
            yield _drawn(rows, random, size, causal, seed, head)

        return pattern

    return _layout(size, block, causal, [of(head) for head in range(heads if random else 1)], heads)


def bigbird(
    length: int,
    *,
    block: int = 16,
    causal: bool = False,
    heads: int = 1,
    random: int = 1,
    window: int = 3,
    global_blocks: int = 1,
    seed: int = 0,
) -> Layout:
    """A sliding window, the rows and columns of the first blocks, and random blocks.

    Args:
        random: further blocks of every row, drawn by ``seed``, anew for each head; with ``causal`` up to the diagonal.
        window: blocks around the diagonal, an odd number: window // 2 on either side.
        global_blocks: the number of first rows that see everything, and of first columns that all rows see. With ``causal``
            only the columns matter.
        seed: of the random blocks.

    >>> sl.sparse.bigbird(1024, causal=True).density < 0.1
    True
    """
    size = _size(length, block)
    _check(heads=(heads, 1), random=(random, 0), global_blocks=(global_blocks, 0))
    _check_window(window)
    if global_blocks > size:
        raise ValueError(f"global_blocks={global_blocks}, and length={length} has {size} blocks a side: use fewer")
    starts = torch.zeros(1, dtype=torch.int64)

    def of(head: int) -> Pattern:
        def pattern(rows: torch.Tensor) -> Iterator[Intervals]:
            yield _around(rows, window)
            yield _crossed(rows, starts, starts + global_blocks)
            yield _whole(rows[rows < global_blocks], size)
            yield _drawn(rows, random, size, causal, seed, head)

        return pattern

    return _layout(size, block, causal, [of(head) for head in range(heads if random else 1)], heads)


def longformer(
    length: int,
    *,
    block: int = 16,
    causal: bool = False,
    window: int = 3,
    global_blocks: Sequence[int] = (0,),
    global_ends: Sequence[int] | None = None,
) -> Layout:
    """A sliding window, and the whole rows and columns of global blocks.

    Args:
        window: blocks around the diagonal, an odd number: window // 2 on either side.
        global_blocks: the first blocks of runs that see everything and that all rows see. Blocks beyond the sequence are left
            out.
        global_ends: the last + 1 block of each of these runs; by default each run is one block.

    >>> sl.sparse.longformer(256).size
    16
    """
    size = _size(length, block)
    _check_window(window)
    low, high = _spans(global_blocks, global_ends)

    def pattern(rows: torch.Tensor) -> Iterator[Intervals]:
        yield _around(rows, window)
        yield _crossed(rows, low, high)
        yield _whole(_inside(rows, low, high), size)

    return _layout(size, block, causal, [pattern])


def sliding_window(length: int, *, block: int = 16, causal: bool = True, window: int = 3) -> Layout:
    """Blocks around the diagonal: window // 2 on either side, or with ``causal`` only before it; ``window`` must be odd.

    >>> layout = sl.sparse.sliding_window(64, window=3)
    >>> print(sl.sparse.draw(layout))
    ██
    ████
      ████
        ████
    """
    _check_window(window)
    return _layout(_size(length, block), block, causal, [lambda rows: iter([_around(rows, window)])])


def _size(length: int, block: int) -> int:
    _check(length=(length, 1), block=(block, 1))
    return int(-(-length // block))


def _check(**given: tuple[int, int]) -> None:
    """Refuse numbers that are not integers, or below their least value: name -> (number, least)."""
    for name, (number, least) in given.items():
        try:
            operator.index(number)
        except TypeError:
            raise TypeError(f"{name}={number!r} is a {type(number).__name__}: use an integer") from None
        if number < least:
            raise ValueError(f"{name}={number} must be at least {least}")


def _check_window(window: int) -> None:
    _check(window=(window, 1))
    if window % 2 == 0:
        raise ValueError(
            f"window={window} blocks do not lie evenly around the diagonal: use {window - 1} or {window + 1}"
        )


def _spans(starts: Sequence[int], ends: Sequence[int] | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The first and the last + 1 block of each run of global blocks."""
    for name, numbers in (("global_blocks", starts), ("global_ends", ends)):
        if isinstance(numbers, int):
            raise TypeError(f"{name}={numbers}: pass a list of blocks, such as ({numbers},)")
        _check(**{f"{name}[{index}]": (number, 0) for index, number in enumerate(numbers or ())})
    ends = [start + 1 for start in starts] if ends is None else ends
    if len(ends) != len(starts) or any(start >= end for start, end in zip(starts, ends)):
        raise ValueError(
            f"global_blocks={tuple(starts)} and global_ends={tuple(ends)}: pass one end for each start, after it"
        )
    return torch.tensor(starts, dtype=torch.int64), torch.tensor(ends, dtype=torch.int64)


def _whole(rows: torch.Tensor, size: int) -> Intervals:
    return rows, torch.zeros_like(rows), torch.full_like(rows, size)


def _around(rows: torch.Tensor, window: int) -> Intervals:
    return rows, rows - window // 2, rows + window // 2 + 1


def _crossed(rows: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> Intervals:
    """The same intervals in every row."""
    return rows.repeat_interleave(len(low)), low.repeat(len(rows)), high.repeat(len(rows))


def _inside(rows: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """The rows that lie in any of the intervals."""
    return rows[((rows[:, None] >= low) & (rows[:, None] < high)).any(dim=1)]


def _drawn(rows: torch.Tensor, count: int, size: int, causal: bool, seed: int, head: int) -> Intervals:
    """``count`` different random columns in every row, or all columns where there are fewer; by Floyd's sampling."""
    if count > size:
        raise ValueError(f"random={count} different blocks, and a row has {size}: use fewer")
    key = Key(seed).fold_in("random blocks").fold_in(head)
    available = rows + 1 if causal else torch.full_like(rows, size)
    drawn = torch.full((len(rows), count), -1)
    for number in range(count):
        largest = available - count + number
        column = random_bits(key.seed, rows * count + number) * (largest + 1) >> 24
        again = (drawn == column[:, None]).any(dim=1)
        drawn[:, number] = torch.where(again, largest, column).where(largest >= 0, -1)
    valid = drawn >= 0
    columns = drawn[valid]
    return rows[:, None].expand_as(drawn)[valid], columns, columns + 1


def _layout(size: int, block: int, causal: bool, patterns: Sequence[Pattern], heads: int = 1) -> Layout:
    """The layout in which head h has pattern h % len(patterns)."""
    compressed = [_compressed(size, causal, pattern) for pattern in patterns]
    return Layout.from_rows(block, compressed, [head % len(patterns) for head in range(heads)], causal)


def _compressed(size: int, causal: bool, pattern: Pattern) -> tuple[torch.Tensor, torch.Tensor]:
    """A pattern's offsets and columns, as `Layout.from_rows` takes them."""
    counts, columns = [], []
    for rows in torch.arange(size).split(max(1, _COLUMNS() // size)):
        blocks = []  # row * size + column, of some blocks several times
        for row, low, high in pattern(rows):
            low, high = low.clamp(min=0), high.clamp(max=size)
            if causal:
                high = torch.minimum(high, row + 1)
            widths = (high - low).clamp(min=0)
            offsets = offsets_of(widths)
            inside = torch.arange(int(offsets[-1])) - offsets[:-1].repeat_interleave(widths)
            blocks.append((row * size + low).repeat_interleave(widths) + inside)
        distinct = torch.unique(torch.cat(blocks))
        counts.append((distinct // size - rows[0]).bincount(minlength=len(rows)))
        columns.append((distinct % size).int())
    return offsets_of(torch.cat(counts)), torch.cat(columns)
