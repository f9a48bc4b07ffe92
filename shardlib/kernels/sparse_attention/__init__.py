"""Attention over the blocks of a layout (Child et al., arXiv 1904.10509; Zaheer et al., arXiv 2007.14062).

Query i of head h sees key j if the layout has the block (i / block, j / block), the key mask is true and, if causal, j ≤ i.
With scores s_ij = scale · q_i·k_j + bias[h, j − i + S − 1] over the keys that it sees:

    L_i = log Σ_j e^(s_ij)        p_ij = e^(s_ij − L_i)        o_i = Σ_j p_ij m_ij v_j

where m_ij is 0 or 1/(1 − p) by dropout, and o_i = 0, L_i = −∞ for a query that sees no key. Backward, from dO:

    dV = (P∘M)ᵀ dO        dS = P ∘ (M ∘ dO Vᵀ − rowsum(dO ∘ O))        dQ = scale · dS K        dK = scale · dSᵀ Q

and dbias sums dS along diagonals, over samples and over heads that share a bias. With n blocks of b positions and heads of
size D, forward takes 4·n·b²·D operations, and backward, which computes the scores again, 10·n·b²·D. If causal, a block above
the diagonal costs nothing, and a block on it at most as much as a whole one. Nothing of the size of the scores is stored:
memory is that of the inputs and outputs, 4 bytes per query for L and the layout's 4 bytes per block. On the CPU each thread
also has one head's keys and values in fp32 (in bf16 for AMX), up to three times, and in backward from bf16 the sums of their
gradients in fp32.

fp32, bf16 and fp16 are multiplied and summed in fp32; plain torch computes float64. With AMX tiles, a CPU multiplies bf16
directly, and P∘M and dS are rounded to bf16 for the products of which they are factors, as flash attention does on GPUs (Dao
et al., arXiv 2205.14135); all sums and the softmax stay in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F

from shardlib.common.thresholds import Threshold
from shardlib.kernels import counter
from shardlib.kernels.common.dispatch import Plain, on, serving
from shardlib.kernels.common.flops import counted
from shardlib.kernels.common.operators import differentiable

__all__ = ["LARGEST", "attend"]

IMPLEMENTATIONS: dict[str, tuple[str, ...]] = {"cpu": ("cpu",), "cuda": ("triton",)}
LARGEST = 256  # size of a head
_ELEMENTS = Threshold(1 << 22)  # scores of a sample's head that plain torch has in memory at a time


class ComputedBlocks(NamedTuple):
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


class SparseAttention(NamedTuple):
    """The arguments of one call.

    Attributes:
        q, k, v: ``[batch, heads, sequence, size]``.
        key_mask: bool ``[batch, sequence]``.
        bias: ``[1 or heads, 2 · sequence − 1]``.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    blocks: ComputedBlocks
    key_mask: torch.Tensor | None
    bias: torch.Tensor | None
    options: Options


def _ready(given: SparseAttention) -> SparseAttention:
    """``given`` with contiguous tensors and the seed spread, as implementations take it."""
    q, k, v = (x.contiguous() for x in given[:3])
    return given._replace(q=q, k=k, v=v, options=given.options._replace(seed=counter.spread(given.options.seed)))


def _forward(given: SparseAttention, using: str | None) -> list[torch.Tensor]:
    with on(given.q.device):
        # The reference cuts what it pads.
        return [x.contiguous() for x in serving("sparse_attention", given.q, using).forward(_ready(given))]


def _backward(
    given: SparseAttention, using: str | None, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor
) -> list[torch.Tensor]:
    tensors = [x.contiguous() for x in (out, lse, dout)]
    with on(given.q.device):
        gradients = serving("sparse_attention", given.q, using).backward(_ready(given), *tensors)
    return [gradient.contiguous() for gradient in gradients if gradient is not None]


def _backward_reference(
    given: SparseAttention, using: str | None, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor
) -> list[torch.Tensor]:
    """`_backward` in plain torch, which computes the log-sum-exp again because derivatives go through it."""
    given = _ready(given)
    gradients = reference.backward(given, out, reference.forward(given)[1], dout)
    return [gradient for gradient in gradients if gradient is not None]


def _forward_fake(given: SparseAttention, using: str | None) -> list[torch.Tensor]:
    lse = given.q.new_empty(given.q.shape[:3], dtype=torch.promote_types(given.q.dtype, torch.float32))
    return [given.q.new_empty(given.q.shape), lse]


def _backward_fake(given: SparseAttention, *_: object) -> list[torch.Tensor]:
    return [x.new_empty(x.shape) for x in (given.q, given.k, given.v, given.bias) if x is not None]


attend: Callable[..., tuple[torch.Tensor, ...]] = differentiable(
    "sparse_attention",
    forward=_forward,
    forward_fake=_forward_fake,
    backward=_backward,
    backward_fake=_backward_fake,
    backward_reference=_backward_reference,
    keep=lambda inputs, outputs: (*inputs, *outputs),
    backward_only=1,
)


def _product(q, k, v, row_offsets, columns, key_mask, bias, block, *_, **__):
    """One product by all blocks: of batch, heads and block² scores, with a head's size."""
    return 2 * q[0] * (q[1] // row_offsets[0]) * columns[0] * block**2 * q[3]


counted(
    "sparse_attention",
    forward=lambda *given, **_: 2 * _product(*given),
    backward=lambda *given, **_: 5 * _product(*given),
)


class reference(Plain):
    """In plain torch: the oracle of the kernels, and the fallback. Also serves float64.

    Query blocks with the same number of key blocks are computed together, as a batch of small dense attentions over gathered
    key blocks. Memory is that of a bounded number of gathered blocks.
    """

    @staticmethod
    def forward(given: SparseAttention) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = given[:3]
        problem = _PlainProblem(given)
        queries, keys, values = problem.queries(q), problem.keys(k), problem.keys(v)
        out, lse = torch.zeros_like(queries), queries.new_full(queries.shape[:-1], -math.inf)
        for band in problem.bands():
            scores = problem.scores(band, band.rows_of(queries), band.columns_of(keys))
            total = scores.logsumexp(dim=-1)
            weights = (scores - total.nan_to_num(neginf=0.0).unsqueeze(-1)).exp()
            weights = weights * problem.kept(band)
            out[:, band.heads, band.rows] = weights @ band.columns_of(values)
            lse[:, band.heads, band.rows] = total
        return problem.cut(out).to(q.dtype), problem.cut(lse.unsqueeze(-1)).squeeze(-1).to(problem.dtype)

    @staticmethod
    def backward(
        given: SparseAttention, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        q, k, v, _, _, bias, options = given
        problem = _PlainProblem(given)
        queries, keys, values, grads = problem.queries(q), problem.keys(k), problem.keys(v), problem.queries(dout)
        inner = (problem.queries(out) * grads).sum(dim=-1, keepdim=True)
        # The weights of a row without a key are e^(−∞ − 0) = 0.
        totals = problem.queries(lse.unsqueeze(-1)).nan_to_num(neginf=0.0)
        dq, dk, dv = torch.zeros_like(queries), torch.zeros_like(keys), torch.zeros_like(values)
        dbias = None if bias is None else torch.zeros(q.shape[1], bias.shape[1], dtype=queries.dtype, device=q.device)
        for band in problem.bands():
            row_queries, row_grads, row_keys = band.rows_of(queries), band.rows_of(grads), band.columns_of(keys)
            scores = problem.scores(band, row_queries, row_keys)
            weights = (scores - band.rows_of(totals)).exp()
            kept = problem.kept(band)
            band.add_to_columns(dv, (weights * kept).mT @ row_grads)
            dscores = weights * (row_grads @ band.columns_of(values).mT * kept - band.rows_of(inner))
            dq[:, band.heads, band.rows] = dscores @ row_keys * options.scale
            band.add_to_columns(dk, dscores.mT @ row_queries * options.scale)
            if dbias is not None:
                distances = problem.distance(band).flatten()
                dbias[band.heads] = dbias[band.heads].index_add(1, distances, dscores.sum(dim=0).flatten(1))
        if bias is not None and dbias is not None:
            dbias = dbias.sum_to_size(bias.shape).to(bias.dtype)
        dk, dv = (problem.cut(x).unflatten(1, (k.shape[1], -1)).sum(dim=2).to(k.dtype) for x in (dk, dv))
        return problem.cut(dq).to(q.dtype), dk, dv, dbias


class _Band(NamedTuple):
    """Rows of blocks, of one head or of all, with n blocks each: ``rows`` [R], and their ``columns`` [R, n]."""

    heads: slice
    rows: torch.Tensor
    columns: torch.Tensor

    def rows_of(self, x: torch.Tensor) -> torch.Tensor:
        """The band's rows (batch, heads, R, block, size) of ``x`` (batch, heads, blocks, block, size)."""
        return x[:, self.heads, self.rows]

    def columns_of(self, x: torch.Tensor) -> torch.Tensor:
        """The band's columns (batch, heads, R, n · block, size) of ``x`` (batch, heads, blocks, block, size)."""
        return x[:, self.heads, self.columns].flatten(3, 4)

    def add_to_columns(self, sums: torch.Tensor, x: torch.Tensor) -> None:
        blocks = x.unflatten(3, (self.columns.shape[1], -1)).flatten(2, 3)
        sums[:, self.heads] = sums[:, self.heads].index_add(2, self.columns.flatten(), blocks)


class _PlainProblem:
    def __init__(self, given: SparseAttention) -> None:
        q, k, _, self.blocks, self.key_mask, self.bias, self.options = given
        self.batch, self.heads, self.length, _ = q.shape
        self.group = self.heads // k.shape[1]
        self.dtype = torch.promote_types(q.dtype, torch.float32)
        self.device = q.device

    def queries(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` as (batch, heads, blocks, block, size), padded with zeros, in fp32 at least."""
        padded = F.pad(x.to(self.dtype), (0, 0, 0, -self.length % self.options.block))
        return padded.unflatten(2, (-1, self.options.block))

    def keys(self, x: torch.Tensor) -> torch.Tensor:
        """Keys or values as `queries` lays them out, each head repeated for the query heads that share it."""
        return self.queries(x.repeat_interleave(self.group, dim=1))

    def cut(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` without its padding, (batch, heads, length, size)."""
        return x.flatten(2, 3)[:, :, : self.length]

    def bands(self) -> Iterator[_Band]:
        many = len(self.blocks.row_offsets) > 1
        for head, offsets in enumerate(self.blocks.row_offsets.long()):
            counts = offsets.diff()
            for count in counts.unique().tolist():
                rows = (counts == count).nonzero().flatten()
                for some in rows.split(max(1, _ELEMENTS() // max(1, count * self.options.block**2))):
                    indices = offsets[some].unsqueeze(1) + torch.arange(count, device=self.device)
                    if count:
                        heads = slice(head, head + 1) if many else slice(None)
                        yield _Band(heads, some, self.blocks.columns[indices].long())

    def positions(self, band: _Band) -> tuple[torch.Tensor, torch.Tensor]:
        """The positions of queries ``[R, block, 1]`` and of keys ``[R, 1, n · block]``."""
        inside = torch.arange(self.options.block, device=self.device)
        queries = band.rows.unsqueeze(1) * self.options.block + inside
        keys = (band.columns.unsqueeze(2) * self.options.block + inside).flatten(1)
        return queries.unsqueeze(2), keys.unsqueeze(1)

    def distance(self, band: _Band) -> torch.Tensor:
        """The distance of keys from queries, as an index of the bias, ``[R, block, n · block]``."""
        queries, keys = self.positions(band)
        return (keys - queries + self.length - 1).clamp(0, 2 * self.length - 2)

    def scores(self, band: _Band, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """The scores (batch, heads, R, block, n · block); −∞ where a query does not see a key."""
        scores = queries @ keys.mT * self.options.scale
        if self.bias is not None:
            bias = self.bias.to(self.dtype).expand(self.heads, -1)[band.heads]
            scores = scores + bias[:, self.distance(band)]
        row, column = self.positions(band)
        seen = (column < self.length) & (row < self.length)
        if self.options.causal:
            seen = seen & (column <= row)
        if self.key_mask is not None:
            # −∞ is added, as in torch: scores that are NaN stay NaN.
            padding = torch.zeros_like(self.key_mask, dtype=self.dtype).masked_fill(~self.key_mask, -math.inf)
            scores = scores + F.pad(padding, (0, -self.length % self.options.block))[:, column].unsqueeze(1)
        return scores.masked_fill(~seen, -math.inf)

    def kept(self, band: _Band) -> torch.Tensor | float:
        """Dropout's factors of the weights."""
        options = self.options
        if not options.dropout:
            return 1.0
        row, column = self.positions(band)
        samples = torch.arange(self.batch, device=self.device).view(-1, 1, 1, 1, 1)
        heads = torch.arange(self.heads, device=self.device)[band.heads].view(-1, 1, 1, 1)
        number = ((samples * self.heads + heads) * self.length + row) * self.length + column
        keep = counter.reference.random_bits(options.seed, options.counter + number) >= int(options.dropout * 2**24)
        return keep.to(self.dtype) / (1.0 - options.dropout)
