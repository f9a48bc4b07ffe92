"""Attention over the blocks of a layout (Child et al., arXiv 1904.10509; Zaheer et al., arXiv 2007.14062).

Query i of head h sees key j where the layout has the block (i / block, j / block), j ≤ i if causal, and the key mask
holds. With scores s_ij = scale · q_i·k_j + bias[h, j − i + S − 1] over what it sees:

    L_i = log Σ_j e^(s_ij)        p_ij = e^(s_ij − L_i)        o_i = Σ_j p_ij m_ij v_j

where m_ij is 0 or 1/(1 − p) by dropout, and o_i = 0, L_i = −∞ for a query that sees no key. Backward, from dO:

    dV = (P∘M)ᵀ dO        dS = P ∘ (M ∘ dO Vᵀ − rowsum(dO ∘ O))        dQ = scale · dS K        dK = scale · dSᵀ Q

and dbias sums dS over samples (and heads that share it) along diagonals. With n blocks of b positions, of heads of size
D, forward takes 4·n·b²·D operations and backward, which computes the scores anew, 10·n·b²·D; a block above the diagonal
costs nothing under a causal mask, one across it costs at most as much as a whole one. Nothing of the size of the scores
is stored: memory is that of the inputs and outputs and 4 bytes per query for L, beside the layout's 4 bytes per block;
on the CPU also, for each thread, one head's keys and values in fp32 (bf16 by AMX), up to three times, and backward from
bf16 their gradients' sums in fp32.
fp32, bf16 and fp16 are multiplied and summed in fp32 (float64 is served by plain torch). Where a CPU has AMX tiles, bf16
is multiplied as it is, and P∘M and dS are rounded to bf16 for the products that they are factors of, as flash attention
does on GPUs (Dao et al., arXiv 2205.14135); all sums, and the softmax, stay in fp32.
"""

from __future__ import annotations

from typing import Any

import torch

from shardlib.kernels.common.arguments import check_tensors
from shardlib.kernels.common.dispatch import on, serving
from shardlib.kernels.common.operators import differentiable
from shardlib.kernels.counter import signed, spread
from shardlib.kernels.sparse_attention import reference
from shardlib.kernels.sparse_attention.options import Blocks, Options
from shardlib.rng import Key, require_key
from shardlib.sparse.layout import Layout, check_layout

IMPLEMENTATIONS = {"cpu": ("cpu",), "cuda": ("triton",)}
_LARGEST = 256  # size of a head


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
    """Attention where each query sees the keys of its blocks alone: (batch, heads, sequence, size), of q's dtype.

    Args:
        q: (batch, heads, sequence, size): fp32, bf16, fp16 or float64; size 256 at most.
        k, v: the same, with as many heads or a divisor of their number (grouped queries).
        layout: of ⌈sequence / block⌉ blocks a side, for one head (all have the same blocks) or for each; on q's device.
            The sequence need not be a multiple of the block.
        causal: a position sees itself and those before it, also inside a block; by default as the layout says.
        scale: of the scores; by default 1/√size.
        key_mask: bool (batch, sequence): False for keys that no query sees, as padding. They must be finite, and so must
            their values: as in ``F.scaled_dot_product_attention`` with a mask, infinity and NaN there reach every query
            whose row has the key's block. (On the CPU nothing reaches a query whose row does not have the block. Under
            ``causal`` a later key is not looked at, but its value may reach queries of its block.)
        bias: (heads, 2 · sequence − 1), or (1, …) for all heads, fp32 (float64 with a float64 q): what is added to a
            score, by the position of the key minus that of the query, plus sequence − 1.
        dropout: the probability with which a weight is dropped; the mask depends on ``rng``, sample, head, query and
            key alone.
        rng: the key of dropout, which needs one.
        using: names one implementation ("cpu", "triton", "reference"), for tests.

    Raises:
        ValueError: shapes that do not fit each other or the layout; a dropout outside [0, 1), or without a key; a causal
            layout and ``causal=False``.
        TypeError: dtypes that are not the above, or what is no `Layout`.
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
    return _attention(q, k, v, layout.row_offsets, layout.columns, key_mask, bias, *options, using)[0]


def _options(block: int, scale: float, causal: bool, dropout: float, seed: int, counter: int) -> Options:
    """As implementations are given them."""
    return Options(block, scale, causal, dropout, spread(seed), counter)


def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    row_offsets: torch.Tensor,
    columns: torch.Tensor,
    key_mask: torch.Tensor | None,
    bias: torch.Tensor | None,
    block: int,
    scale: float,
    causal: bool,
    dropout: float,
    seed: int,
    counter: int,
    using: str | None,
) -> list[torch.Tensor]:
    blocks = Blocks(row_offsets, columns)
    options = _options(block, scale, causal, dropout, seed, counter)
    with on(q.device):
        out, lse = serving("sparse_attention", q, using).forward(
            q.contiguous(), k.contiguous(), v.contiguous(), blocks, key_mask, bias, options
        )
    return [out, lse]


def _backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    row_offsets: torch.Tensor,
    columns: torch.Tensor,
    key_mask: torch.Tensor | None,
    bias: torch.Tensor | None,
    block: int,
    scale: float,
    causal: bool,
    dropout: float,
    seed: int,
    counter: int,
    using: str | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
) -> list[torch.Tensor]:
    blocks = Blocks(row_offsets, columns)
    options = _options(block, scale, causal, dropout, seed, counter)
    tensors = [x.contiguous() for x in (dout, q, k, v, out, lse)]
    with on(q.device):
        gradients = serving("sparse_attention", q, using).backward(*tensors, blocks, key_mask, bias, options)
    return [gradient for gradient in gradients if gradient is not None]


def _backward_reference(*kept: Any) -> list[torch.Tensor]:
    """`_backward`; the log-sum-exp is computed anew, as derivatives go through it."""
    *given, out, _, dout = kept
    q, k, v = given[:3]
    rest = Blocks(*given[3:5]), *given[5:7], _options(*given[7:13])
    lse = reference.forward(q, k, v, *rest)[1]
    gradients = reference.backward(dout, q, k, v, out, lse, *rest)
    return [gradient for gradient in gradients if gradient is not None]


def _forward_fake(q: torch.Tensor, *_: object) -> list[torch.Tensor]:
    lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
    return [q.new_empty(q.shape), lse]


def _backward_fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: torch.Tensor | None) -> list[torch.Tensor]:
    bias = rest[3]
    return [x.new_empty(x.shape) for x in (q, k, v, bias) if x is not None]


_attention = differentiable(
    "sparse_attention",
    forward=_forward,
    forward_fake=_forward_fake,
    backward=_backward,
    backward_fake=_backward_fake,
    backward_reference=_backward_reference,
    keep=lambda inputs, outputs: (*inputs, *outputs),
    residuals=1,
)


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: Layout,
    key_mask: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> None:
    """Kernels read by these sizes: what does not have them must not reach one."""
    given = {"q": q, "k": k, "v": v, "layout": layout.columns, "key_mask": key_mask, "bias": bias}
    exactly = {"layout": layout.columns.dtype, "key_mask": torch.bool}
    check_tensors("sparse_attention", given, ("key_mask", "bias"), exactly)
    if q.dim() != 4 or not 0 < q.shape[3] <= _LARGEST:
        raise ValueError(f"q has shape {tuple(q.shape)}, not (batch, heads, sequence, size up to {_LARGEST})")
    batch, heads, length, size = q.shape
    for name, x in (("k", k), ("v", v)):
        if x.dim() != 4 or x.shape[0] != batch or x.shape[2:] != q.shape[2:]:
            wanted = f"({batch}, heads, {length}, {size})"
            raise ValueError(f"{name} has shape {tuple(x.shape)}, and q's {tuple(q.shape)} asks for {wanted}")
        if x.dtype != q.dtype:
            raise TypeError(f"q is {q.dtype} and {name} is {x.dtype}: cast one")
    if k.shape[1] != v.shape[1] or not k.shape[1] or heads % k.shape[1]:
        raise ValueError(
            f"{heads} heads of q, {k.shape[1]} of k and {v.shape[1]} of v: k and v must have as many, a divisor of q's"
        )
    if layout.size != -(-length // layout.block):
        raise ValueError(
            f"a sequence of {length} has {-(-length // layout.block)} blocks of {layout.block}, and the layout has "
            f"{layout.size}: make it for length={length}"
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
