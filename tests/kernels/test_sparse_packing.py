"""Packing of a layout's blocks into tiles: every block once, and as little work as the blocks allow."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardlib.kernels.sparse_attention import ComputedBlocks, Options, packing
from shardlib.kernels.sparse_attention.packing import cells
from shardlib.sparse.layout import Layout


def blocks_of(layout):
    return ComputedBlocks(layout.row_offsets, layout.columns)


@st.composite
def drawn_layouts(draw):
    """Any, with rows and columns that are full or empty among them."""
    size, heads = draw(st.integers(1, 14)), draw(st.sampled_from((1, 2, 4)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**30)))
    dense = torch.rand(heads, size, size, generator=generator) < draw(st.sampled_from((0.0, 0.1, 0.5, 1.0)))
    for value in (True, False):
        dense[:, draw(st.integers(0, size - 1))] = value
        dense[:, :, draw(st.integers(0, size - 1))] = value
    if draw(st.booleans()):
        dense[:] = dense[draw(st.integers(0, heads - 1))].clone()  # heads that share a pattern
    return Layout.from_dense(dense, 32)


def pairs_of(packings, heads):
    """(head, list, entry) of all that the items of every packing work on, and what else must hold of them."""
    found, members, computed = [], [], 0
    for packed in packings:
        slots = [slot for slot in packed.items[:, 4].tolist() if slot >= 0]
        assert sorted(slots) == list(range(packed.slots))
        merged = {tuple(merge[:2]): list(range(*merge[2:])) for merge in packed.merges.tolist()}
        by_tile = {}
        for head, tile, start, stop, slot in packed.items.tolist():
            by_tile.setdefault((head, tile), []).append((start, stop, slot))
        for (head, tile), parts in by_tile.items():
            parts.sort()
            assert all(a[1] == b[0] for a, b in pairwise(parts))  # no step is left out or done twice
            assert [slot for _, _, slot in parts] == merged.pop((head, tile), [-1])
            lists = [position for position in packed.members[tile].tolist() if position < packed.lists]
            members += [(head, position) for position in lists]
            here = slice(parts[0][0], parts[-1][1])
            entries, bits = packed.blocks[here].flatten().tolist(), packed.bits[here].flatten().tolist()
            used = [entry for entry, bit in zip(entries, bits) if bit]
            assert used == sorted(set(used))
            assert len(entries) < len(used) + packed.blocks.shape[1]
            found += [
                (head, position, entry)
                for entry, bit in zip(entries, bits)
                for r, position in enumerate(lists)
                if bit >> r & 1
            ]
            assert all(bit < 1 << len(lists) for bit in bits)
            computed += len(entries) * packed.rows
        assert not merged
    assert sorted(members) == [(head, position) for head in range(heads) for position in range(packings[0].lists)]
    assert len(found) == len(set(found))
    return set(found)


@given(
    layout=drawn_layouts(),
    rows=st.sampled_from((1, 2, 8)),
    few=st.sampled_from((1, 2)),
    width=st.sampled_from((1, 4)),
    parts=st.sampled_from((1, 2)),
    causal=st.booleans(),
    group=st.sampled_from((1, 2, 4)),
    least=st.sampled_from((1, 16)),
)
def test_every_cell_is_computed_once(layout, rows, few, width, parts, causal, group, least):
    cut = cells(blocks_of(layout), 32, 32 // parts, causal)
    dense = layout.to_dense().repeat_interleave(parts, 1).repeat_interleave(parts, 2)
    if causal:
        dense = dense.tril()
    heads, size = dense.shape[:2]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "LEAST_STEPS", least)
        by_row = packing.pack(cut.by_row(), rows, width, few)
        by_diagonal = packing.pack(cut.by_diagonal(), rows, width, few)
        shared = heads == 1
        if shared or heads % group == 0:
            by_column = packing.pack(cut.by_column(group), rows, width, few)
            own = dense.expand(group, -1, -1) if shared else dense
            wanted = {(h // group, j, h % group * size + i) for h, i, j in own.nonzero().tolist()}
            assert pairs_of(by_column, len(own) // group) == wanted
    assert pairs_of(by_row, heads) == set(map(tuple, dense.nonzero().tolist()))
    assert pairs_of(by_diagonal, heads) == {(h, j - i + size - 1, i) for h, i, j in dense.nonzero().tolist()}


def fixed(size, window=4):
    """Windows, and the last column of each for all rows."""
    position = torch.arange(size)
    dense = position[:, None] // window == position // window
    dense[:, window - 1 :: window] = True
    return dense


def big_bird(size, seed=0):
    """The first row and column, the diagonal and its neighbours, and a random block for each row."""
    position = torch.arange(size)
    dense = (position[:, None] - position).abs() <= 1
    dense[0] = dense[:, 0] = True
    dense[position, torch.randint(0, size, (size,), generator=torch.Generator().manual_seed(seed))] = True
    return dense


def cover(dense, side):
    """Blocks in the tiles of side × side blocks that hold any."""
    size = len(dense) // side
    return int(dense.view(size, side, size, side).any(3).any(1).sum()) * side**2


@pytest.mark.parametrize("pattern, most, least_saved", [(fixed, 1.04, 3.8), (big_bird, 4.5, 2.5)])
@pytest.mark.parametrize("direction", ["by_row", "by_column"])
def test_work_follows_the_density(pattern, most, least_saved, direction):
    """16384 tokens in blocks of 16, tiles of 128 × 128: block pairs computed, over those of the layout and of a cover."""
    dense = pattern(1024)
    cut = cells(blocks_of(Layout.from_dense(dense, 16)), 16, 16, False)
    lists = cut.by_row() if direction == "by_row" else cut.by_column(1)
    work = sum(packed.work for packed in packing.pack(lists, 8, 8, 1))
    assert work <= most * int(dense.sum())
    assert cover(dense, 8) >= least_saved * work


@pytest.mark.parametrize("make, most", [(fixed, 1.04), (big_bird, 2.4)])
def test_the_tile_is_chosen_by_the_work(make, most):
    """Tiles of 128 compute four times BigBird's blocks."""
    triton = pytest.importorskip("shardlib.kernels.sparse_attention.triton")
    layout = Layout.from_dense(make(1024), 16)
    q = torch.empty(2, 4, 2**14, 64, dtype=torch.bfloat16)
    share = triton.work(q, q[:, :2], blocks_of(layout), Options(16, 1.0))
    assert layout.density <= share <= most * layout.density


@pytest.mark.parametrize("direction", ["by_row", "by_column"])
def test_no_program_is_much_longer_than_the_others(direction):
    """A global row of 65536 tokens would be 512 steps, among tiles of 3."""
    dense = big_bird(4096)
    cut = cells(blocks_of(Layout.from_dense(dense, 16)), 16, 16, False)
    packings = packing.pack(cut.by_row() if direction == "by_row" else cut.by_column(1), 8, 8, 1)
    assert max(int((packed.items[:, 3] - packed.items[:, 2]).max()) for packed in packings) <= packing.LEAST_STEPS
    assert sum(packed.slots for packed in packings) <= 2 * 4096 // 8 / packing.LEAST_STEPS


def test_memory_follows_the_blocks():
    """131072 tokens, sixteen heads of two patterns: what is held is a few bytes a block of a pattern."""
    size = 8192
    rows = torch.arange(size)
    near = (rows[:, None] + torch.arange(-1, 2)).clamp(0, size - 1).unique_consecutive(dim=1)
    patterns = []
    for far in (size // 2, size // 3):
        both = torch.cat([near, ((rows + far) % size)[:, None]], 1).sort(1).values
        keep = torch.cat([torch.ones(size, 1, dtype=torch.bool), both.diff(dim=1) > 0], 1)
        patterns.append((torch.cat([torch.zeros(1, dtype=torch.int64), keep.sum(1).cumsum(0)]), both[keep]))
    layout = Layout.from_rows(16, patterns, [0, 1] * 8)
    cut = cells(blocks_of(layout), 16, 16, False)
    stored = len(layout.columns)
    assert len(cut.row) == stored
    held = sum(
        tensor.nbytes
        for packed in packing.pack(cut.by_row(), 8, 8, 1)
        for tensor in (packed.members, packed.blocks, packed.bits)
    )
    assert held <= 24 * stored
