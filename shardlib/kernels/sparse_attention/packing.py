"""A layout's blocks as lists, packed into tiles, so that small blocks of a layout fill a tensor core's tile.

The kernels compute cells: squares whose side is a power of two, divides the layout's block and is at most a tile's side. A
larger block is several cells. A list is the key cells of one row of query cells, the query cells of one column, or the cells
of a diagonal. Heads with the same blocks share a pattern, and the pattern's lists.

A tile is a few lists that one program computes together. Its entries are the sorted union of its lists; each entry has a bit
for every list of the tile that holds it. A step is as many entries as fill the other side of the tile. So the work is
proportional to the union, and blocks that are in no list of the tile are not read.

A long list (of a global row or column) among short ones would make its tile's union long: lists of more than twice the median
length get separate tiles, smaller ones if there are few such lists. A tile whose entries take many steps is cut into several
items that run in parallel; each writes a partial result to a slot, and slots are merged in order.

Packing is vectorised over blocks and takes memory proportional to their number.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardlib.kernels.sparse_attention import ComputedBlocks

LEAST_STEPS = 16  # a shorter item would not be worth the memory of a slot


@dataclass(frozen=True, eq=False)
class Lists:
    """The lists of all patterns, as pairs.

    Attributes:
        pattern_of: int64 ``[heads]``: each head's pattern; ``[1]`` if all heads share one.
        patterns: the number of patterns.
        count: the number of lists of a pattern.
        span: entries are in [0, span).
        owner: int64 ``[pairs]``: the list that holds an entry, pattern · count + list.
        entry: int64 ``[pairs]``; no pair of owner and entry occurs twice.
    """

    pattern_of: torch.Tensor
    patterns: int
    count: int
    span: int
    owner: torch.Tensor
    entry: torch.Tensor

    def lengths(self) -> torch.Tensor:
        return torch.bincount(self.owner, minlength=self.patterns * self.count)


@dataclass(frozen=True, eq=False)
class Cells:
    """Every cell of every pattern: its pattern, row and column, int64 ``[cells]``; a pattern has ``size`` × ``size``."""

    pattern_of: torch.Tensor
    patterns: int
    size: int
    pattern: torch.Tensor
    row: torch.Tensor
    column: torch.Tensor

    def by_row(self) -> Lists:
        """The columns of every row."""
        owner = self.pattern * self.size + self.row
        return Lists(self.pattern_of, self.patterns, self.size, self.size, owner, self.column)

    def by_column(self, group: int) -> Lists:
        """The rows of every column, over the ``group`` query heads that share a key head: entry = member · size + row."""
        members = self.pattern_of.expand(group) if len(self.pattern_of) == 1 else self.pattern_of
        groups, group_of = torch.unique(members.view(-1, group), dim=0, return_inverse=True)
        chosen = [self.pattern == pattern for pattern in range(self.patterns)]
        owner, entry = [], []
        for number, pattern in enumerate(groups.flatten().tolist()):
            owner.append(number // group * self.size + self.column[chosen[pattern]])
            entry.append(number % group * self.size + self.row[chosen[pattern]])
        return Lists(group_of, len(groups), self.size, group * self.size, torch.cat(owner), torch.cat(entry))

    def by_diagonal(self) -> Lists:
        """The rows of every diagonal: list = column − row + size − 1."""
        count = 2 * self.size - 1
        owner = self.pattern * count + self.column - self.row + self.size - 1
        return Lists(self.pattern_of, self.patterns, count, self.size, owner, self.row)


def cells(blocks: ComputedBlocks, block: int, side: int, causal: bool) -> Cells:
    """A layout's blocks cut into cells of ``side``; if ``causal``, without the cells above the diagonal."""
    offsets, pattern_of = torch.unique(blocks.row_offsets.long(), dim=0, return_inverse=True)
    patterns, rows = offsets.shape[0], offsets.shape[1] - 1
    counts = offsets.diff(dim=1).flatten()
    owner = torch.repeat_interleave(counts)
    within = torch.arange(len(owner), device=owner.device) - (counts.cumsum(0) - counts)[owner]
    column = blocks.columns[offsets[:, :-1].flatten()[owner] + within].long()
    per_block = block // side
    inside = torch.arange(per_block, device=owner.device)
    pattern = (owner // rows)[:, None, None].expand(-1, per_block, per_block)
    row = ((owner % rows)[:, None, None] * per_block + inside[:, None]).expand(-1, per_block, per_block)
    column = (column[:, None, None] * per_block + inside).expand(-1, per_block, per_block)
    kept = column <= row if causal else torch.ones_like(column, dtype=torch.bool)
    return Cells(pattern_of, patterns, rows * per_block, pattern[kept], row[kept], column[kept])


@dataclass(frozen=True, eq=False)
class TilePacking:
    """Tiles of ``rows`` lists and steps of ``width`` entries; all tensors are int32.

    Attributes:
        members: ``[tiles, rows]``: the lists of a tile, ``Lists.count`` where there is none.
        blocks: ``[steps, width]``: entries, 0 where there is none.
        bits: ``[steps, width]``: bit r is set if the tile's list r holds the entry.
        items: ``[items, 5]``: head, tile, first step, stop step, slot (−1 if the tile has one item); the longest item of a
            head first.
        merges: ``[merges, 4]``: head, tile, first slot, stop slot.
        slots: the number of slots.
        heads: the number of heads in ``items``: 1 if all heads share one pattern.
        lists: the number of lists of a head.
    """

    members: torch.Tensor
    blocks: torch.Tensor
    bits: torch.Tensor
    items: torch.Tensor
    merges: torch.Tensor
    slots: int
    heads: int
    lists: int

    @property
    def rows(self) -> int:
        """The number of lists of a tile."""
        return self.members.shape[1]

    @property
    def work(self) -> int:
        """The number of pairs of blocks that are computed."""
        return self.blocks.numel() * self.rows


def pack(lists: Lists, rows: int, width: int, few: int) -> list[TilePacking]:
    """Packings that together hold every list once, empty lists too.

    Args:
        rows: lists of a tile.
        width: entries of a step.
        few: long lists of a tile, if there are fewer than ``rows`` long lists.
    """
    lengths = lists.lengths()
    long = lengths > 2 * torch.median(lengths).clamp(min=width)
    most = int(long.view(lists.patterns, -1).sum(1).max()) if rows > 1 else 0
    tiled = [_tiles(lists, ~long if most else torch.ones_like(long), rows)]
    if most:
        tiled.append(_tiles(lists, long, few if most < rows else rows))
    filled = [(members, *_steps(lists, tile, bit, len(members), width), of) for members, of, tile, bit in tiled]
    steps = torch.cat([steps for _, steps, _, _, _ in filled])
    # At most about one slot per two tiles, so that slots never take more memory than the result in fp32.
    heads = len(lists.pattern_of)
    limit = max(LEAST_STEPS, 2 * -(-int(steps.sum()) // max(len(steps), 1)))
    return [
        TilePacking(members, blocks, bits, *_of_heads(lists.pattern_of, *_items(of, steps, limit)), heads, lists.count)
        for members, steps, blocks, bits, of in filled
        if len(members)
    ]


def _tiles(
    lists: Lists, chosen: torch.Tensor, rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tiles of the ``chosen`` lists: their members and patterns, and for every list its tile (−1: none) and its bit."""
    chosen = chosen.view(lists.patterns, lists.count)
    rank = chosen.cumsum(1) - 1
    tiles = -(-chosen.sum(1) // rows)
    tile = (tiles.cumsum(0) - tiles)[:, None] + rank // rows
    total = int(tiles.sum())
    members = torch.full((total, rows), lists.count, dtype=torch.int32, device=chosen.device)
    number = torch.arange(lists.count, dtype=torch.int32, device=chosen.device).expand_as(chosen)
    members[tile[chosen], (rank % rows)[chosen]] = number[chosen]
    pattern = torch.repeat_interleave(tiles)
    return members, pattern, torch.where(chosen, tile, -1).flatten(), (1 << rank % rows).flatten().int()


def _steps(
    lists: Lists, tile: torch.Tensor, bit: torch.Tensor, tiles: int, width: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The number of steps of each tile, and the entries and bits of all steps."""
    tile_of_pair = tile[lists.owner]
    chosen = tile_of_pair >= 0
    pairs = tile_of_pair[chosen] * lists.span + lists.entry[chosen]
    union, inverse = torch.unique(pairs, return_inverse=True)
    bits = torch.zeros(len(union), dtype=torch.int32, device=union.device)
    bits.index_add_(0, inverse, bit[lists.owner[chosen]])  # the bits differ, so their sum is their union
    tile = union // lists.span
    counts = torch.bincount(tile, minlength=tiles)
    steps = -(-counts // width)
    padding = (steps.cumsum(0) - steps) * width - (counts.cumsum(0) - counts)
    at = torch.arange(len(union), device=union.device) + padding[tile]
    packed = torch.zeros(2, int(steps.sum()) * width, dtype=torch.int32, device=union.device)
    packed[0, at] = (union % lists.span).int()
    packed[1, at] = bits
    return steps, packed[0].view(-1, width), packed[1].view(-1, width)


def _items(pattern: torch.Tensor, steps: torch.Tensor, limit: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Items of at most ``limit`` steps, and merges; both have the pattern as their first number, not the head."""
    cuts = (-(-steps // limit)).clamp(min=1)
    tile = torch.repeat_interleave(cuts)
    number = torch.arange(len(tile), device=steps.device) - (cuts.cumsum(0) - cuts)[tile]
    first = (steps.cumsum(0) - steps)[tile]
    start, stop = (first + steps[tile] * n // cuts[tile] for n in (number, number + 1))
    slotted = torch.where(cuts > 1, cuts, 0)
    first_slot = slotted.cumsum(0) - slotted
    slot = torch.where(cuts[tile] > 1, first_slot[tile] + number, -1)
    items = torch.stack([pattern[tile], tile, start, stop, slot], 1)
    order = torch.argsort(stop - start, descending=True, stable=True)
    several = slotted.nonzero().flatten()
    merges = torch.stack([pattern[several], several, first_slot[several], (first_slot + slotted)[several]], 1)
    return items[order], merges


def _of_heads(
    pattern_of: torch.Tensor, items: torch.Tensor, merges: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """The items and merges of every head, by its pattern and with separate slots, and the number of slots."""
    all_items, all_merges, slots = [], [], 0
    for head, pattern in enumerate(pattern_of.tolist()):
        item, merge = items[items[:, 0] == pattern], merges[merges[:, 0] == pattern]
        item[:, 0] = merge[:, 0] = head
        if len(merge):
            shift = slots - int(merge[:, 2].min())
            item[:, 4] += torch.where(item[:, 4] >= 0, shift, 0)
            merge[:, 2:] += shift
            slots = int(merge[:, 3].max())
        all_items.append(item)
        all_merges.append(merge)
    return torch.cat(all_items).int(), torch.cat(all_merges).int(), slots
