"""Arguments of the implementations of sparse attention."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Blocks(NamedTuple):
    """The blocks of a `shardlib.sparse.Layout`, by rows.

    Attributes:
        row_offsets: int32 ``[heads, size + 1]``, or ``[1, size + 1]`` if all heads share one pattern: the row's first index
            in ``columns``. Several heads may refer to the same columns.
        columns: int32 ``[blocks]``, ascending in every row.
    """

    row_offsets: torch.Tensor
    columns: torch.Tensor


class Options(NamedTuple):
    """The arguments that are numbers.

    Attributes:
        block: queries, and keys, per block.
        scale: the factor of the scores.
        causal: query i sees only keys 0 … i; blocks above the diagonal are skipped.
        dropout: the probability of a weight to be dropped; the other weights are divided by 1 − dropout.
        seed: of dropout, spread by `shardlib.kernels.counter.spread`.
        counter: the weight of query i and key j of head h of sample b has the random bits of `shardlib.rng` of index
            counter + ((b·H + h)·S + i)·S + j, and is kept where they are at least ⌊dropout · 2²⁴⌋.
    """

    block: int
    scale: float
    causal: bool = False
    dropout: float = 0.0
    seed: int = 0
    counter: int = 0


class Attention(NamedTuple):
    """The arguments of one call.

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
