"""Sparse attention without shardlib's kernels: gathered blocks in plain torch, FlexAttention, and dense attention."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from shardlib.sparse import Layout

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

_SCORES = 1 << 23  # of a head that are held at a time
_FLEX_BLOCK = 128  # what FlexAttention is made for


def flash(device: torch.device) -> Attention:
    """Dense attention by flash attention on a GPU."""
    backend = SDPBackend.FLASH_ATTENTION if device.type == "cuda" else SDPBackend.MATH

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v)

    return attention


def flex(layout: Layout, length: int, device: torch.device) -> Attention:
    """FlexAttention with the same blocks, compiled on a GPU."""
    mask = coarse_mask(layout, length)
    function = torch.compile(flex_attention, dynamic=False) if device.type == "cuda" else flex_attention
    return lambda q, k, v: function(q, k, v, block_mask=mask)


def coarse_mask(layout: Layout, length: int) -> BlockMask:
    """The layout in blocks of 128, with a mask in the blocks that the layout does not fill."""
    seen, block = layout.to_dense(), layout.block
    side = _FLEX_BLOCK // block
    cells = seen.view(layout.heads, layout.size // side, side, layout.size // side, side)
    full = cells.all(4).all(2)
    partial = cells.any(4).any(2) & ~full

    def mask_mod(sample: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return seen[head % len(seen), query // block, key // block]

    def lists(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        order = blocks.int().argsort(dim=-1, descending=True, stable=True).int()
        return blocks.sum(dim=-1).int()[None], order[None].contiguous()

    sizes = (length, length)
    return BlockMask.from_kv_blocks(
        *lists(partial), *lists(full), BLOCK_SIZE=_FLEX_BLOCK, mask_mod=mask_mod, seq_lengths=sizes
    )


class Gathered:
    """Attention over the blocks of a layout that all heads share, not causal; the sequence is a multiple of the block.

    Key blocks are gathered; rows with the same number of blocks form a batch of small dense attentions; autograd
    differentiates them. (Batches of `F.scaled_dot_product_attention` took 1.6 times as long in fp32 here, and 15 times in
    bf16.)
    """

    def __init__(self, layout: Layout) -> None:
        self.block, self.size = layout.block, layout.size
        offsets = layout.row_offsets[0].long()
        counts = offsets.diff()
        self.groups = []
        for count in counts.unique().tolist():
            rows = (counts == count).nonzero().flatten()
            for some in rows.split(max(1, _SCORES // max(1, count * self.block**2))):
                indices = offsets[some].unsqueeze(1) + torch.arange(count)
                self.groups.append((some, layout.columns[indices].flatten().long()))
        self.order = torch.cat([rows for rows, _ in self.groups]).argsort()

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """(batch, heads, sequence, size)"""
        queries, keys, values = (x.unflatten(2, (self.size, self.block)) for x in (q, k, v))
        found = []
        for rows, columns in self.groups:
            near, of = (x.index_select(2, columns).unflatten(2, (len(rows), -1)).flatten(3, 4) for x in (keys, values))
            scores = queries.index_select(2, rows) * q.shape[-1] ** -0.5 @ near.mT
            found.append(scores.softmax(dim=-1) @ of)
        return torch.cat(found, dim=2).index_select(2, self.order).flatten(2, 3)
