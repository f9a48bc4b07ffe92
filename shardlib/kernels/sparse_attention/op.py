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

import torch

from shardlib.kernels.common.dispatch import on, serving
from shardlib.kernels.common.operators import counted, differentiable
from shardlib.kernels.counter import spread
from shardlib.kernels.sparse_attention import reference
from shardlib.kernels.sparse_attention.arguments import Attention

IMPLEMENTATIONS = {"cpu": ("cpu",), "cuda": ("triton",)}
LARGEST = 256  # size of a head


def _ready(given: Attention) -> Attention:
    """``given`` with contiguous tensors and the seed spread, as implementations take it."""
    q, k, v = (x.contiguous() for x in given[:3])
    return given._replace(q=q, k=k, v=v, options=given.options._replace(seed=spread(given.options.seed)))


def _forward(given: Attention, using: str | None) -> list[torch.Tensor]:
    with on(given.q.device):
        # The reference cuts what it pads.
        return [x.contiguous() for x in serving("sparse_attention", given.q, using).forward(_ready(given))]


def _backward(
    given: Attention, using: str | None, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor
) -> list[torch.Tensor]:
    tensors = [x.contiguous() for x in (out, lse, dout)]
    with on(given.q.device):
        gradients = serving("sparse_attention", given.q, using).backward(_ready(given), *tensors)
    return [gradient.contiguous() for gradient in gradients if gradient is not None]


def _backward_reference(
    given: Attention, using: str | None, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor
) -> list[torch.Tensor]:
    """`_backward` in plain torch, which computes the log-sum-exp again because derivatives go through it."""
    given = _ready(given)
    gradients = reference.backward(given, out, reference.forward(given)[1], dout)
    return [gradient for gradient in gradients if gradient is not None]


def _forward_fake(given: Attention, using: str | None) -> list[torch.Tensor]:
    lse = given.q.new_empty(given.q.shape[:3], dtype=torch.promote_types(given.q.dtype, torch.float32))
    return [given.q.new_empty(given.q.shape), lse]


def _backward_fake(given: Attention, *_: object) -> list[torch.Tensor]:
    return [x.new_empty(x.shape) for x in (given.q, given.k, given.v, given.bias) if x is not None]


attend = differentiable(
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
