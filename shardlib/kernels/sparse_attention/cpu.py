"""Block-sparse attention on the CPU, by sparse_attention.cpp."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from shardlib.kernels.common import native
from shardlib.kernels.sparse_attention import ComputedBlocks, Options, SparseAttention

_TILE = 16  # as in tiles.h
_PROBLEM = "pp" + 8 * "l" + "pplfilfll"  # as in `_NativeProblem`
_SIGNATURES = {
    "sparse_attention_forward": "pppippppi" + _PROBLEM,
    "sparse_attention_backward": "pppppippppplpppi" + _PROBLEM,
    "sparse_attention_panels": "p" + _PROBLEM,
}


def load(device: torch.device) -> str:
    return native.description("sparse_attention")


def forward(given: SparseAttention) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v = given[:3]
    problem = _problem(given)
    queries, keys, values = (_padded(x) for x in (q, k, v))
    out = torch.empty_like(queries)
    lse = torch.empty(queries.shape[:3])
    dtype = native.DTYPES[queries.dtype]
    factors, done, threads = _scratch(keys)
    _library().sparse_attention_forward(queries, keys, values, dtype, out, lse, factors, done, threads, *problem)
    length, size = q.shape[2:]
    return out[:, :, :length, :size].to(q.dtype).contiguous(), lse[:, :, :length].contiguous()


def backward(
    given: SparseAttention, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    q, k, v, _, _, bias, _ = given
    problem = _problem(given)
    queries, keys, values, outs, grads = (_padded(x) for x in (q, k, v, out, dout))
    batch, heads, padded, _ = queries.shape
    totals = F.pad(lse, (0, padded - lse.shape[2]), value=-math.inf)
    # A head's queries are split among threads only if there are fewer heads than threads: every split has its own sums.
    splits = -(-torch.get_num_threads() // max(1, batch * k.shape[1]))
    dq = torch.empty_like(queries)
    dk, dv = (torch.empty(splits, *x.shape, dtype=x.dtype if splits == 1 else torch.float32) for x in (keys, values))
    by_distance = None if bias is None else torch.zeros(splits, batch, heads, 2 * padded)
    dtype = native.DTYPES[queries.dtype]
    factors, done, threads = _scratch(keys)
    # Gradients in fp32 are summed in place, others in a buffer for a head at a time.
    sums = None if dk.dtype == torch.float32 else torch.empty(threads, 2, padded, keys.shape[3])
    _library().sparse_attention_backward(
        grads, queries, keys, values, outs, dtype, totals, dq, dk, dv, by_distance, splits,
        factors, sums, done, threads, *problem
    )  # fmt: skip
    length, size = q.shape[2:]
    dbias = None
    if bias is not None and by_distance is not None:
        unpadded = by_distance[..., padded - length :][..., : 2 * length - 1]
        dbias = unpadded.sum(dim=(0, 1)).sum_to_size(bias.shape).to(bias.dtype)
    dk, dv = ((x[0] if splits == 1 else x.sum(dim=0))[:, :, :length, :size] for x in (dk, dv))
    dq = dq[:, :, :length, :size]
    return dq.to(q.dtype).contiguous(), dk.to(k.dtype).contiguous(), dv.to(v.dtype).contiguous(), dbias


def work(q: torch.Tensor, k: torch.Tensor, blocks: ComputedBlocks, options: Options) -> float:
    """The measured share of all pairs of positions, padded to whole panels of 16, that is computed."""
    problem = _problem(SparseAttention(q, k, k, blocks, None, None, options))
    panels = torch.empty(1, dtype=torch.int64)
    _library().sparse_attention_panels(panels, *problem)
    return panels.item() * _TILE**2 / (problem.batch * problem.query_heads * problem.padded**2)


def _library() -> Any:
    return native.cpp_functions("sparse_attention", _SIGNATURES)


def _padded(x: torch.Tensor) -> torch.Tensor:
    """``x`` padded with zeros to whole panels of positions and to whole vectors of a head's numbers."""
    x = native.readable(x)
    length, size = x.shape[2:]
    return F.pad(x, (0, -size % _TILE, 0, -length % _TILE)) if length % _TILE or size % _TILE else x


def _scratch(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Buffers for one head's factors per thread, flags of the panels that they hold, and the number of threads."""
    threads = torch.get_num_threads()
    _, _, padded, size = keys.shape
    return torch.empty(threads, 3, padded, size), torch.empty(threads, 4, padded // _TILE, dtype=torch.uint8), threads


class _NativeProblem(NamedTuple):
    """The fields of ``Problem`` in scores.h."""

    row_offsets: torch.Tensor
    columns: torch.Tensor
    heads: int
    batch: int
    query_heads: int
    key_heads: int
    length: int
    padded: int
    size: int
    block: int
    key_bias: torch.Tensor
    bias: torch.Tensor | None
    bias_heads: int
    scale: float
    causal: int
    threshold: int
    kept: float
    seed: int
    counter: int


def _problem(given: SparseAttention) -> _NativeProblem:
    q, k, _, blocks, key_mask, bias, options = given
    batch, heads, length, size = q.shape
    padding = -length % _TILE
    seen = torch.ones(batch, length, dtype=torch.bool) if key_mask is None else key_mask
    hidden = ~F.pad(seen, (0, padding))
    by_distance = None
    if bias is not None:
        # For the padded length, and in units of ln 2, as are scores.
        by_distance = F.pad(bias / math.log(2), (padding, padding + 1))
    return _NativeProblem(
        row_offsets=blocks.row_offsets,
        columns=blocks.columns,
        heads=len(blocks.row_offsets),
        batch=batch,
        query_heads=heads,
        key_heads=k.shape[1],
        length=length,
        padded=length + padding,
        size=size + -size % _TILE,
        block=options.block,
        key_bias=torch.zeros(hidden.shape).masked_fill(hidden, -math.inf),
        bias=by_distance,
        bias_heads=0 if by_distance is None else len(by_distance),
        scale=options.scale,
        causal=int(options.causal),
        threshold=int(options.dropout * 2**24),
        kept=1 / (1 - options.dropout),
        seed=options.seed,
        counter=options.counter,
    )
