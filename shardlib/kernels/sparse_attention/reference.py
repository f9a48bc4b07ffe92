"""Block-sparse attention in plain torch: the oracle of the kernels, and the fallback. Also serves float64.

Query blocks with the same number of key blocks are computed together, as a batch of small dense attentions over gathered key
blocks. Memory is that of a bounded number of gathered blocks.

See `shardlib.kernels.sparse_attention.op` for the mathematics.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F

from shardlib.common.thresholds import Threshold
from shardlib.kernels.counter.reference import random_bits
from shardlib.kernels.sparse_attention.arguments import Attention

_ELEMENTS = Threshold(1 << 22)  # scores of a sample's head in memory at a time


def load(device: torch.device) -> str:
    return "reference"


def forward(given: Attention) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v = given[:3]
    problem = _Problem(given)
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


def backward(
    given: Attention, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    q, k, v, _, _, bias, options = given
    problem = _Problem(given)
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


class _Problem:
    def __init__(self, given: Attention) -> None:
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
        keep = random_bits(options.seed, options.counter + number) >= int(options.dropout * 2**24)
        return keep.to(self.dtype) / (1.0 - options.dropout)
