"""What the implementations of sparse attention are given."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Blocks(NamedTuple):
    """The blocks of a `shardlib.sparse.Layout`, by rows.

    Offsets are int32 ``[heads, size + 1]``, heads being 1 where all share one pattern, and absolute: those of several
    heads may point to the same places. ``columns`` are int32 ``[blocks]``, ascending in every row.
    """

    row_offsets: torch.Tensor
    columns: torch.Tensor


class Options(NamedTuple):
    """Numbers, not tensors.

    Attributes:
        block: queries, and keys, per block.
        scale: of the scores.
        causal: query i sees keys 0 … i alone; blocks above the diagonal are passed over.
        dropout: the probability with which a weight is dropped; kept ones are divided by 1 − dropout.
        seed: of dropout, spread (`shardlib.kernels.counter.spread`).
        counter: the weight of query i and key j of head h of sample b is number counter + ((b·H + h)·S + i)·S + j of the
            random numbers of `shardlib.rng`, and is kept where the 24 bits are at least ⌊dropout · 2²⁴⌋.
    """

    block: int
    scale: float
    causal: bool = False
    dropout: float = 0.0
    seed: int = 0
    counter: int = 0


class Attention(NamedTuple):
    """One call.

    Attributes:
        q, k, v: ``[batch, heads, sequence, size]``.
        key_mask: bool ``[batch, sequence]``.
        bias: ``[1 or heads, 2 · sequence − 1]``.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    blocks: Blocks
    key_mask: torch.Tensor | None
    bias: torch.Tensor | None
    options: Options
