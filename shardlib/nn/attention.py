"""Attention, dense or over the blocks of a layout, for models whose activations may be sequence parts."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from shardlib.collectives.sequence.base import Attention
from shardlib.common.environment import environment
from shardlib.nn.sparse_attention import sparse_attention
from shardlib.sparse.layout import Layout, check_layout


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool | None = None,
    scale: float | None = None,
    key_mask: torch.Tensor | None = None,
    layout: Layout | None = None,
    segments: torch.Tensor | None = None,
) -> torch.Tensor:
    """``F.scaled_dot_product_attention`` over the whole sequence, also where this rank holds only a part of it.

    Args:
        q: (batch, heads, sequence, size); under a sequence plan of this rank's part.
        k, v: as q, with as many heads or a divisor of their number (grouped queries).
        causal: whether a position sees no later ones; by default as the layout says, and False without a layout.
        scale: of the scores; by default 1/√size.
        key_mask: bool (batch, sequence), of the whole sequence on every rank: False for padding, which no position sees.
        layout: the blocks of the whole sequence to compute, by `shardlib.nn.sparse_attention`; None for all.
        segments: integers (batch, sequence), of the whole sequence on every rank: a position sees only those of its own
            segment, such as the document that it belongs to in a packed sequence (`sl.data.packed`). Takes memory for a
            mask of sequence² booleans for each row of the batch.

    Raises:
        SpecError: kind="ulysses", and heads that do not divide over its axis; kind="ring", and ``key_mask``,
            ``layout`` or ``segments``.
        ValueError: a layout of another length; a layout of several heads that is not of this rank's number of heads (where
            heads are split over ranks, use a layout of one head); a causal layout and ``causal=False``; ``segments`` with a
            layout, or of another shape.

    >>> q, k, v = torch.randn(3, 2, 4, 16, 8)
    >>> sl.nn.attention(q, k, v, causal=True).shape
    torch.Size([2, 4, 16, 8])
    """
    causal = bool(causal) if layout is None else check_layout(layout).causal_for(causal)
    how, parts = Attention(causal, scale, key_mask, layout, segments), environment().parts
    return plain_attention(q, k, v, how) if parts is None else parts.attention(q, k, v, how)


def plain_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, how: Attention) -> torch.Tensor:
    """`attention` on a rank whose q, k and v have all positions."""
    if how.segments is not None:
        _check_segments(how.segments, q, how.layout)
    if how.layout is not None:
        layout = how.layout.to(q.device)
        return sparse_attention(q, k, v, layout, causal=how.causal, scale=how.scale, key_mask=how.key_mask)
    mask = None if how.key_mask is None else how.key_mask[:, None, None, :]
    if how.segments is not None:
        same = how.segments[:, None, :, None] == how.segments[:, None, None, :]
        mask = same if mask is None else mask & same
    causal = how.causal
    if mask is not None and causal:
        length = q.shape[2]
        mask, causal = mask & torch.ones(length, length, dtype=torch.bool, device=q.device).tril(), False
    grouped = k.shape[1] != q.shape[1]
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=how.scale, enable_gqa=grouped)


def _check_segments(segments: torch.Tensor, q: torch.Tensor, layout: Layout | None) -> None:
    if layout is not None:
        raise ValueError(
            "attention takes segments or a layout, and got both: use dense attention for packed documents (layout=None), or "
            "one document a row with a layout and a key_mask"
        )
    if segments.shape != (q.shape[0], q.shape[2]) or segments.is_floating_point():
        raise ValueError(
            f"segments are integers (batch, sequence) = {(q.shape[0], q.shape[2])}, of the whole sequence on every rank, and "
            f"got {segments.dtype} of shape {tuple(segments.shape)}"
        )
