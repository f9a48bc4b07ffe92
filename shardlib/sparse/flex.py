"""Conversion between layouts and the `BlockMask` of FlexAttention (torch.nn.attention.flex_attention)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.attention.flex_attention import BlockMask

from shardlib.common.thresholds import Threshold
from shardlib.sparse.layout import Layout

# (sample, head, query, key) -> whether the query sees the key.
MaskMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

_BLOCKS = Threshold(1 << 10)  # blocks whose masks are checked at a time


def to_block_mask(layout: Layout, length: int, *, causal: bool | None = None) -> BlockMask:
    """The layout as a `BlockMask`.

    The mask has the block lists, which compiled FlexAttention uses, and a ``mask_mod``, which is all that eager FlexAttention
    uses. The lists take 16 bytes for every block, computed or not: FlexAttention is meant for blocks of 128.

    Args:
        length: of the sequence.
        causal: whether to mask inside the blocks on the diagonal and leave out those above; by default as the layout says.

    Raises:
        ValueError: a layout of another length, or a causal one and ``causal=False``.

    >>> sl.sparse.to_block_mask(sl.sparse.sliding_window(256, block=128, window=1), 256).shape
    (1, 1, 256, 256)
    """
    causal = layout.causal_for(causal)
    if layout.size != -(-length // layout.block):
        raise ValueError(f"the layout has {layout.size} blocks a side, not those of length={length}")
    seen = layout.to_dense()
    block = layout.block

    def mask_mod(sample: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        blocks = seen[head % len(seen), query // block, key // block]
        return blocks & (key <= query) if causal else blocks

    numbers = torch.arange(layout.size, device=seen.device)
    below, diagonal = numbers[:, None] > numbers, numbers[:, None] == numbers
    partial, full = (seen & diagonal, seen & below) if causal else (torch.zeros_like(seen), seen)
    return BlockMask.from_kv_blocks(
        *_lists(partial), *_lists(full), BLOCK_SIZE=block, mask_mod=mask_mod, seq_lengths=(length, length)
    )


def from_block_mask(mask: BlockMask, *, causal: bool = False) -> Layout:
    """The layout that has the blocks of a `BlockMask`.

    Args:
        causal: whether in ``mask`` a position sees no later ones; the layout is then causal too.

    Raises:
        ValueError: a mask that no layout expresses: one for each sample, one with blocks that are not square, or a
            ``mask_mod`` that hides other pairs inside a block than ``causal`` does.

    >>> from torch.nn.attention.flex_attention import create_block_mask
    >>> mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 256, 256, device="cpu")
    >>> sl.sparse.from_block_mask(mask, causal=True).size
    2
    """
    batch = mask.shape[0]
    block, block_keys = mask.BLOCK_SIZE
    length, keys = mask.seq_lengths
    if batch != 1:
        raise ValueError(f"a BlockMask for {batch} samples: give each a layout, or pass padding as key_mask")
    if block != block_keys or length != keys:
        raise ValueError(f"blocks of {block} × {block_keys} in {length} × {keys} scores: a layout is square")
    partial = _dense(mask.kv_num_blocks, mask.kv_indices)
    full = torch.zeros_like(partial)
    if mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None:
        full = _dense(mask.full_kv_num_blocks, mask.full_kv_indices)
    for kind, blocks, mask_mod in (("partial", partial, mask.mask_mod), ("full", full, None)):
        _check(kind, blocks, mask_mod, block, length, causal)
    blocks = partial | full
    return Layout.from_dense(blocks.tril() if causal else blocks, block, causal=causal)


def _lists(dense: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The number of blocks of each row (1, heads, size), and columns (1, heads, size, size), the row's blocks first."""
    order = dense.int().argsort(dim=-1, descending=True, stable=True).int()
    return dense.sum(dim=-1).int()[None], order[None].contiguous()


def _dense(counts: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """The blocks of these lists as bool (heads, size, size): the inverse of `_lists`."""
    size = counts.shape[-1]
    first = torch.arange(indices.shape[-1], device=counts.device) < counts[0, :, :, None]
    dense = torch.zeros(*counts.shape[1:], size + 1, dtype=torch.bool, device=counts.device)
    columns = indices[0].long().where(first, size)  # the rest goes to a column that is cut off
    return dense.scatter_(2, columns, True)[..., :size]


def _check(kind: str, blocks: torch.Tensor, mask_mod: MaskMod | None, block: int, length: int, causal: bool) -> None:
    """Raise `ValueError` unless ``mask_mod`` hides exactly what ``causal`` hides inside ``blocks``."""
    inside = torch.arange(block, device=blocks.device)
    zero = torch.zeros((), dtype=torch.int64, device=blocks.device)
    for head, row, column in (some.unbind(1) for some in blocks.nonzero().split(_BLOCKS())):
        query = (row[:, None] * block + inside)[:, :, None]
        key = (column[:, None] * block + inside)[:, None, :]
        seen = torch.ones_like(query - key, dtype=torch.bool)
        if mask_mod is not None:
            seen = mask_mod(zero, head[:, None, None].expand_as(seen), query.expand_as(seen), key.expand_as(seen))
        wanted = key <= query if causal else torch.ones_like(seen)
        counts = (query < length) & (key < length)
        if not (seen == wanted)[counts.expand_as(seen)].all():
            raise ValueError(
                f"inside its {kind} blocks, this BlockMask hides other pairs than causal={causal} does: pass causal, or make "
                "the mask of smaller blocks"
            )
