"""The usual patterns of block-sparse attention, made row by row in compressed form.

A row's blocks are a union of intervals of columns. Rows are taken some thousand at a time, so that making a pattern
needs little more memory than the result.

Sources: sparse transformers (Child et al., arXiv 1904.10509), BigBird (Zaheer et al., arXiv 2007.14062) and Longformer
(Beltagy et al., arXiv 2004.05150), in the block forms that DeepSpeed made common, with the same defaults. Lengths are in
positions, everything else in blocks. With ``causal`` no block lies above the diagonal; inside the blocks on it
attention masks, as the layout is causal then. ``heads`` is the number of heads that the layout is for; 1 does for any
number. Windows around the diagonal have an odd number of blocks, as many to either side; what of a window lies beyond the
sequence does not count.

Every pattern raises ValueError for sizes that make no sense, and TypeError for what is no integer.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence

import torch

from shardlib.kernels.common.thresholds import Threshold
from shardlib.kernels.counter import random_bits
from shardlib.rng import Key
from shardlib.sparse.layout import Layout, offsets_of

_COLUMNS = Threshold(1 << 22)  # of intervals that are written out at a time

# The rows, and the first and last + 1 column of each.
Intervals = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
# Rows -> what each sees, by several families of intervals.
Pattern = Callable[[torch.Tensor], Iterator[Intervals]]


def dense(length: int, *, block: int = 16, causal: bool = False) -> Layout:
    """Every block.

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
    """Windows of ``local`` blocks side by side, and of each window ``global_blocks`` blocks that every row sees.

    Args:
        local: blocks of a window: a multiple of ``global_blocks``.
        global_blocks: columns of each window that all rows see: its last ones, or for head h as many that come
            h % patterns times as many before the end. A shorter last window has them there too, or at its end.
        patterns: different choices of global columns among the heads.
        horizontal: the rows of global blocks see everything, too; not with ``causal``.

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
        raise ValueError(f"patterns={patterns} needs as many heads, and there are heads={heads}: pass heads")
    if horizontal and causal:
        raise ValueError("horizontal=True lets rows see what comes after them: leave causal out, or horizontal")

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
    """Windows of several sizes, global blocks that are named, and random ones.

    Args:
        random: blocks that every row sees besides, drawn by ``seed``, for each head anew.
        windows: sizes of the windows, one after the other; the last repeats.
        global_blocks: columns that all rows see. Those beyond the sequence are left out.
        global_ends: where the global columns end that begin at ``global_blocks``; by default each is one column.
        horizontal: the rows of global blocks see everything, too; not with ``causal``.

    >>> sl.sparse.variable(256, windows=(2, 4), random=1).size
    16
    """
    size = _size(length, block)
    _check(heads=(heads, 1), random=(random, 0))
    if isinstance(windows, int) or not windows:
        raise ValueError(f"windows={windows!r}: a list of sizes, one at least, such as (4,)")
    _check(**{f"windows[{number}]": (window, 1) for number, window in enumerate(windows)})
    if horizontal and causal:
        raise ValueError("horizontal=True lets rows see what comes after them: leave causal out, or horizontal")
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
    """A sliding window, the first blocks' rows and columns, and random blocks.

    Args:
        random: blocks that every row sees besides, drawn by ``seed``, for each head anew; with ``causal`` among those up
            to the diagonal.
        window: blocks around the diagonal, an odd number: window // 2 to either side.
        global_blocks: how many rows see everything, from the first, and how many columns everything sees: with ``causal``
            the columns alone matter.

    >>> sl.sparse.bigbird(1024, causal=True).density < 0.1
    True
    """
    size = _size(length, block)
    _check(heads=(heads, 1), random=(random, 0), global_blocks=(global_blocks, 0))
    _check_window(window)
    if global_blocks > size:
        raise ValueError(f"global_blocks={global_blocks} of {size} blocks a side (length={length}): use fewer")
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
    """A sliding window, and global blocks whose rows and columns are whole.

    Args:
        window: blocks around the diagonal, an odd number: window // 2 to either side.
        global_blocks: blocks that see everything and that everything sees. Those beyond the sequence are left out.
        global_ends: where they end; by default each is one block.

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
    """Blocks around the diagonal: ``window``, an odd number, // 2 to either side, or before it alone with ``causal``.

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
    """Every number is an integer, and at least so much."""
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
    """First and last + 1 of the global blocks that are named."""
    for name, numbers in (("global_blocks", starts), ("global_ends", ends)):
        if isinstance(numbers, int):
            raise TypeError(f"{name}={numbers}: a list of blocks, such as ({numbers},)")
        _check(**{f"{name}[{place}]": (number, 0) for place, number in enumerate(numbers or ())})
    ends = [start + 1 for start in starts] if ends is None else ends
    if len(ends) != len(starts) or any(start >= end for start, end in zip(starts, ends)):
        raise ValueError(f"global_blocks={tuple(starts)} and global_ends={tuple(ends)}: an end after each start")
    return torch.tensor(starts, dtype=torch.int64), torch.tensor(ends, dtype=torch.int64)


def _whole(rows: torch.Tensor, size: int) -> Intervals:
    return rows, torch.zeros_like(rows), torch.full_like(rows, size)


def _around(rows: torch.Tensor, window: int) -> Intervals:
    return rows, rows - window // 2, rows + window // 2 + 1


def _crossed(rows: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> Intervals:
    """The same intervals in every row."""
    return rows.repeat_interleave(len(low)), low.repeat(len(rows)), high.repeat(len(rows))


def _inside(rows: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """The rows that lie in one of the intervals."""
    return rows[((rows[:, None] >= low) & (rows[:, None] < high)).any(dim=1)]


def _drawn(rows: torch.Tensor, count: int, size: int, causal: bool, seed: int, head: int) -> Intervals:
    """``count`` different columns in every row, or all there are: Floyd's sampling, a number after the other."""
    if count > size:
        raise ValueError(f"random={count} different blocks of a row that has {size}: use fewer")
    key = Key(seed).fold_in("random blocks").fold_in(head)
    available = rows + 1 if causal else torch.full_like(rows, size)
    drawn = torch.full((len(rows), count), -1)
    for number in range(count):
        largest = available - count + number
        column = random_bits(key.seed, rows * count + number) * (largest + 1) >> 24
        again = (drawn == column[:, None]).any(dim=1)
        drawn[:, number] = torch.where(again, largest, column).where(largest >= 0, -1)
    found = drawn >= 0
    columns = drawn[found]
    return rows[:, None].expand_as(drawn)[found], columns, columns + 1


def _layout(size: int, block: int, causal: bool, patterns: Sequence[Pattern], heads: int = 1) -> Layout:
    """Head h has pattern h % len(patterns)."""
    made = [_compressed(size, causal, pattern) for pattern in patterns]
    return Layout.from_rows(block, made, [head % len(patterns) for head in range(heads)], causal)


def _compressed(size: int, causal: bool, pattern: Pattern) -> tuple[torch.Tensor, torch.Tensor]:
    """Offsets and columns."""
    counts, columns = [], []
    for rows in torch.arange(size).split(max(1, _COLUMNS() // size)):
        places = []
        for row, low, high in pattern(rows):
            low, high = low.clamp(min=0), high.clamp(max=size)
            if causal:
                high = torch.minimum(high, row + 1)
            widths = (high - low).clamp(min=0)
            into = offsets_of(widths)
            inside = torch.arange(int(into[-1])) - into[:-1].repeat_interleave(widths)
            places.append((row * size + low).repeat_interleave(widths) + inside)
        found = torch.unique(torch.cat(places))
        counts.append((found // size - rows[0]).bincount(minlength=len(rows)))
        columns.append((found % size).int())
    return offsets_of(torch.cat(counts)), torch.cat(columns)
