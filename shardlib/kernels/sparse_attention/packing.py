"""Block lists packed into tiles: small blocks of a layout gathered so that a tensor core's tile is full.

A tile is a few lists (a list: the key blocks of one query block, or the query blocks of one key block) that are worked
on together. Its entries are the union of its lists, sorted; an entry has a bit for each of the tile's lists that holds
it. A step is as many entries as fill the other side of the tile. So the work is that of the union, and no block that
is in none of a tile's lists is read.

Long lists (a global row's, a global column's) among short ones would make the union of their tiles long: lists of more
than twice the median length get tiles of their own, smaller ones if they are few. A tile whose entries take many steps
is cut into several items that run side by side; each leaves a partial result in a slot, and slots are merged in order.

All of it is vectorised over blocks, in memory proportional to their number.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardlib.kernels.sparse_attention.lists import Lists

LEAST_STEPS = 16  # an item shorter than this is not worth a slot's bytes


@dataclass(frozen=True, eq=False)
class Packing:
    """Tiles of some lists and steps of some entries; all tensors int32.

    Attributes:
        members: ``[tiles, rows]``, the lists of a tile; ``Lists.count`` where there is none.
        blocks: ``[steps, width]``, entries; 0 where there is none.
        bits: ``[steps, width]``, bit r is set where the tile's list r holds the entry.
        items: ``[items, 5]``: head, tile, first step, stop step, slot (−1: the tile's only item), the longest of a head
            first.
        merges: ``[merges, 4]``: head, tile, first slot, stop slot.
        slots: how many.
        heads: that have items; one head stands for all heads.
        lists: of a head.
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
        """Lists of a tile."""
        return self.members.shape[1]

    @property
    def work(self) -> int:
        """Pairs of blocks computed."""
        return self.blocks.numel() * self.rows


def pack(lists: Lists, rows: int, width: int, few: int) -> list[Packing]:
    """Packings that hold every list once, empty ones too.

    Args:
        rows: lists of a tile.
        width: entries of a step.
        few: lists of a tile of long ones, where there are not ``rows`` of these.
    """
    lengths = lists.lengths()
    long = lengths > 2 * torch.median(lengths).clamp(min=width)
    most = int(long.view(lists.patterns, -1).sum(1).max()) if rows > 1 else 0
    tiled = [_tiles(lists, ~long if most else torch.ones_like(long), rows)]
    if most:
        tiled.append(_tiles(lists, long, few if most < rows else rows))
    filled = [(members, *_steps(lists, tile, bit, len(members), width), of) for members, of, tile, bit in tiled]
    steps = torch.cat([steps for _, steps, _, _, _ in filled])
    # At most about a slot for every two tiles in all: slots never take more memory than the result in fp32.
    heads = len(lists.pattern_of)
    limit = max(LEAST_STEPS, 2 * -(-int(steps.sum()) // max(len(steps), 1)))
    return [
        Packing(members, blocks, bits, *_of_heads(lists.pattern_of, *_items(of, steps, limit)), heads, lists.count)
        for members, steps, blocks, bits, of in filled
        if len(members)
    ]


def _tiles(
    lists: Lists, chosen: torch.Tensor, rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The ``chosen`` lists in tiles: members, the pattern of each tile; and of each list its tile (−1: none) and its bit."""
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
    """How many steps each tile takes, and the entries and bits of all of them."""
    of_pair = tile[lists.owner]
    there = of_pair >= 0
    pairs = of_pair[there] * lists.span + lists.entry[there]
    union, place = torch.unique(pairs, return_inverse=True)
    bits = torch.zeros(len(union), dtype=torch.int32, device=union.device)
    bits.index_add_(0, place, bit[lists.owner[there]])  # of different bits: the sum is their union
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
    """Items of at most ``limit`` steps and merges, with the pattern in the place of the head."""
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
    """The items and merges of every head's pattern, with slots of their own, and how many slots these are."""
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
