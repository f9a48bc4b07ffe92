"""Attention, dense or over the blocks of a layout, for models whose activations may be sequence parts."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from shardlib.collectives.sequence.base import Attention
from shardlib.common.environment import environment
from shardlib.kernels.common.arguments import check_tensors
from shardlib.kernels.counter import signed
from shardlib.kernels.sparse_attention import LARGEST, attend
from shardlib.rng import Key, require_key
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
            mask of sequence² booleans for each row of the batch; with kind="ring" for its part of one.

    Raises:
        SpecError: kind="ulysses", and heads that do not divide over its axis; kind="ring", and a ``layout``.
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
    how.require_segments(q.shape[0], q.shape[2])
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


def sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: Layout,
    *,
    causal: bool | None = None,
    scale: float | None = None,
    key_mask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    dropout: float = 0.0,
    rng: Key | None = None,
    using: str | None = None,
) -> torch.Tensor:
    """Attention in which each query sees only the keys of its blocks: (batch, heads, sequence, size), of q's dtype.

    Args:
        q: (batch, heads, sequence, size): fp32, bf16, fp16 or float64; size 256 at most.
        k, v: as q, with as many heads or a divisor of their number (grouped queries).
        layout: ⌈sequence / block⌉ blocks a side, for one head (all heads have the same blocks) or for each head; on q's
            device. The sequence need not be a multiple of the block.
        causal: whether a position sees no later ones, also inside a block; by default as the layout says.
        scale: of the scores; by default 1/√size.
        key_mask: bool (batch, sequence): False for keys that no query sees, such as padding. Masked keys and their values
            must be finite: as in ``F.scaled_dot_product_attention`` with a mask, their infinities and NaNs reach every query
            whose row has the key's block. (On the CPU they reach no other query. Under ``causal``, later keys are not read,
            but their values may reach queries of the same block.)
        bias: (heads, 2 · sequence − 1), or (1, 2 · sequence − 1) for all heads; fp32 (float64 with a float64 q). Entry
            key position − query position + sequence − 1 is added to a score.
        dropout: the probability with which a weight is dropped. The mask depends only on ``rng``, sample, head, query and
            key.
        rng: the key of dropout; required with dropout.
        using: the implementation ("cpu", "triton", "reference"), for tests; by default the fastest that serves q's device.

    Raises:
        ValueError: shapes that do not fit each other or the layout; a dropout outside [0, 1), or without a key; a causal
            layout and ``causal=False``.
        TypeError: other dtypes, or a layout that is not a `Layout`.

    >>> layout = sl.sparse.sliding_window(length=64, window=3, causal=True)
    >>> q, k, v = torch.randn(3, 2, 4, 64, 8)
    >>> sl.nn.sparse_attention(q, k, v, layout).shape
    torch.Size([2, 4, 64, 8])
    """
    causal = check_layout(layout).causal_for(causal)
    _check(q, k, v, layout, key_mask, bias)
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"dropout probability {dropout} is outside [0, 1)")
    seed = counter = 0
    if dropout:
        if rng is None:
            raise ValueError(f"dropout={dropout} without rng: pass the loss function's rng, or sl.Key(seed)")
        seed, counter = require_key("sparse_attention", "rng", rng).stretch(q.shape[0] * q.shape[1] * q.shape[2] ** 2)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    options = layout.block, scale, causal, dropout, signed(seed), counter
    return attend(q, k, v, layout.row_offsets, layout.columns, key_mask, bias, *options, using)[0]


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: Layout,
    key_mask: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> None:
    """Refuse tensors of other shapes and dtypes than the kernels read, which do not check them."""
    given = {"q": q, "k": k, "v": v, "layout": layout.columns, "key_mask": key_mask, "bias": bias}
    exactly = {"layout": layout.columns.dtype, "key_mask": torch.bool}
    check_tensors("sparse_attention", given, ("key_mask", "bias"), exactly)
    if q.dim() != 4 or not 0 < q.shape[3] <= LARGEST:
        raise ValueError(f"q has shape {tuple(q.shape)}, not (batch, heads, sequence, size up to {LARGEST})")
    batch, heads, length, size = q.shape
    for name, x in (("k", k), ("v", v)):
        if x.dim() != 4 or x.shape[0] != batch or x.shape[2:] != q.shape[2:]:
            wanted = f"({batch}, heads, {length}, {size})"
            raise ValueError(f"{name} has shape {tuple(x.shape)}, and q's shape {tuple(q.shape)} requires {wanted}")
        if x.dtype != q.dtype:
            raise TypeError(f"q is {q.dtype} and {name} is {x.dtype}: cast one")
    if k.shape[1] != v.shape[1] or not k.shape[1] or heads % k.shape[1]:
        raise ValueError(
            f"{heads} heads of q, {k.shape[1]} of k and {v.shape[1]} of v: k and v must have as many, a divisor of q's"
        )
    if layout.size != -(-length // layout.block):
        blocks = -(-length // layout.block)
        raise ValueError(
            f"a sequence of {length} has {blocks} blocks of {layout.block}, and the layout has {layout.size}: make it for "
            f"length={length}"
        )
    if layout.heads not in (1, heads):
        raise ValueError(f"the layout has {layout.heads} heads and q has {heads}: make it for 1 or for {heads}")
    if key_mask is not None and key_mask.shape != (batch, length):
        raise ValueError(f"key_mask has shape {tuple(key_mask.shape)}, not (batch, sequence) = ({batch}, {length})")
    if bias is not None:
        if bias.shape not in ((1, 2 * length - 1), (heads, 2 * length - 1)):
            shapes = f"(1 or {heads}, {2 * length - 1})"
            raise ValueError(f"bias has shape {tuple(bias.shape)}, not (1 or heads, 2 · sequence − 1) = {shapes}")
        wide = torch.promote_types(q.dtype, torch.float32)
        if bias.dtype != wide:
            raise TypeError(f"bias is {bias.dtype} and q {q.dtype}: give it in {wide}")
