"""Sparse attention by a dense masked softmax, and what the Triton kernels must agree on with it.

As a script it holds the Triton kernels to that under Triton's interpreter, which has to be on before a kernel is
decorated.
"""

import math
from dataclasses import dataclass
from unittest.mock import patch

import torch

from shardlib.kernels.sparse_attention import packing
from shardlib.kernels.sparse_attention.options import Blocks, Options
from shardlib.rng import Key, bits_at
from shardlib.sparse.layout import Layout


@dataclass(frozen=True)
class Case:
    """Shapes and options; the blocks are drawn, some rows and columns of them empty and some full."""

    batch: int = 1
    heads: int = 2
    key_heads: int = 2
    length: int = 130
    size: int = 16
    block: int = 16
    patterns: int = 1
    density: float = 0.3
    dtype: torch.dtype = torch.float32
    causal: bool = False
    masked: bool = False
    bias: int = 0
    dropout: float = 0.0
    least_steps: int = 16


CASES = {
    "plain": Case(),
    "one position": Case(length=1),
    "grouped, all options": Case(2, 4, 2, 50, patterns=4, causal=True, masked=True, bias=4, dropout=0.3),
    "one key head, shared layout": Case(1, 4, 1, 70, 24, 32, masked=True, bias=1, dropout=0.5),
    "heads that share patterns": Case(1, 4, 2, 64, patterns=2, bias=1),
    "a block larger than a tile's": Case(1, 2, 1, 192, 16, 128, density=0.6, causal=True),
    "a block that ends beyond the sequence": Case(2, 1, 1, 80, 20, 64, density=0.9, bias=1),
    "no samples": Case(batch=0, bias=1),
    "no blocks": Case(length=40, density=0.0),
    "long rows and columns in parts": Case(1, 2, 1, 330, density=0.05, bias=1, least_steps=1),
    "in parts, causal": Case(1, 2, 2, 250, patterns=2, density=0.3, causal=True, bias=2, least_steps=1),
    "fp16": Case(1, 2, 1, 130, 64, 32, masked=True, bias=1, dropout=0.2, dtype=torch.float16),
    "bf16": Case(1, 2, 1, 130, 64, 64, density=0.6, causal=True, dtype=torch.bfloat16),
    "a large head": Case(1, 1, 1, 40, 200, 32, density=0.8),
}


def problem(case: Case, seed: int = 0):
    """q, k, v, dout, layout, key mask, bias and options."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    blocks = -(-case.length // case.block)
    dense = torch.rand(case.patterns, blocks, blocks, generator=generator) < case.density
    if case.density and blocks > 4:
        dense[:, 1], dense[:, :, 2] = True, True
        dense[:, 3], dense[:, :, 4] = False, False
    shape = (case.batch, case.heads, case.length, case.size)
    of_keys = (case.batch, case.key_heads, case.length, case.size)
    q, k, v, dout = (normal(*s).to(case.dtype) for s in (shape, of_keys, of_keys, shape))
    mask = (torch.rand(case.length, case.batch, generator=generator) < 0.7).T if case.masked else None
    bias = normal(2 * case.length - 1, case.bias).T if case.bias else None
    heads = [0] if case.patterns == 1 else [h % case.patterns for h in range(case.heads)]
    layout = Layout.from_dense(dense[heads], case.block)
    seed = -(2**40) - 5
    options = Options(case.block, 1 / math.sqrt(case.size), case.causal, case.dropout, seed, counter=2**32 - 700)
    return q, k, v, dout, layout, mask, bias, options


def dense_attention(q, k, v, layout, mask, bias, options):
    """Out and log-sum-exp, by the whole matrix of scores; differentiable."""
    length, group = q.shape[2], q.shape[1] // k.shape[1]
    seen = layout.to_dense().repeat_interleave(layout.block, 1).repeat_interleave(layout.block, 2)
    seen = seen[None, :, :length, :length]
    if options.causal:
        seen = seen.tril()
    if mask is not None:
        seen = seen & mask[:, None, None, :]
    place = torch.arange(length)
    scores = q @ k.repeat_interleave(group, 1).mT * options.scale
    if bias is not None:
        scores = scores + bias[:, place - place[:, None] + length - 1]
    scores = scores.masked_fill(~seen, -math.inf)
    weights = scores.softmax(-1).nan_to_num()  # rows without a key
    if options.dropout:
        number = torch.arange(scores.numel()).view(scores.shape) + options.counter
        keep = bits_at(Key(options.seed), number) >= int(options.dropout * 2**24)
        weights = weights * keep / (1 - options.dropout)
    return weights @ v.repeat_interleave(group, 1), scores.logsumexp(-1)


def check(implementation, case: Case, seed: int = 0) -> None:
    """Forward and gradients against the dense ones in float64."""
    q, k, v, dout, layout, mask, bias, options = problem(case, seed)
    inputs = [t.double().requires_grad_() for t in (q, k, v, *([] if bias is None else [bias]))]
    wide = dict(zip(("q", "k", "v", "bias"), inputs))
    wanted, wanted_lse = dense_attention(wide["q"], wide["k"], wide["v"], layout, mask, wide.get("bias"), options)
    wanted_grads = torch.autograd.grad(wanted, inputs, dout.double())
    blocks = Blocks(layout.row_offsets, layout.columns, layout.column_offsets, layout.rows)
    with patch.object(packing, "LEAST_STEPS", case.least_steps):
        out, lse = implementation.forward(q, k, v, blocks, mask, bias, options)
        grads = implementation.backward(dout, q, k, v, out, lse, blocks, mask, bias, options)
    assert (grads[3] is None) == (bias is None)
    assert lse.dtype == torch.float32 and torch.equal(lse.isinf(), wanted_lse.isinf())
    exact = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[case.dtype]
    torch.testing.assert_close(lse.double(), wanted_lse.detach(), rtol=2e-6, atol=2e-6)
    for found, right in zip((out, *grads), (wanted, *wanted_grads)):
        assert found.dtype == (case.dtype if found.dim() == 4 else torch.float32)
        largest = torch.cat([right.detach().abs().flatten(), torch.ones(1)]).max().item()
        torch.testing.assert_close(found.double(), right.detach(), rtol=0, atol=exact * largest)


if __name__ == "__main__":
    from shardlib.kernels.sparse_attention import triton

    torch.set_num_threads(1)
    for each in CASES.values():
        check(triton, each)
