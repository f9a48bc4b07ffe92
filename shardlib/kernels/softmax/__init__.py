"""y = softmax(scale · x) of attention scores with a causal mask and padded keys, forward and backward in one pass each.

x is ``[batch, heads, queries, keys]``. Query i sees the keys j with j ≤ i (if causal) and j < lengths[batch] (if given);
for other keys y is 0, and x is not read. With m the maximum of scale·x over the keys that a query sees:

- y_j = e^(scale·x_j − m) / Σ_k e^(scale·x_k − m); a row without a key to see is 0.
- dx = scale · y ⊙ (dy − Σ_k y_k·dy_k).

In fp32, bf16 or fp16 (float64 by plain torch), computed in fp32. Bytes moved per element in fp32: 8 forward (x, y), 12
backward (y, dy, dx), half of that if causal; plain torch moves 36 and 24 with a mask to fill. Operations: an exponential
and five more. Only y is saved. If y itself is not needed, `F.scaled_dot_product_attention` stores no scores at all.
"""

from __future__ import annotations

import torch

from shardlib.common.thresholds import threads
from shardlib.kernels.common import native, rows
from shardlib.kernels.common.arguments import check_tensors
from shardlib.kernels.common.dispatch import Plain, on, serving
from shardlib.kernels.common.operators import differentiable

__all__ = ["softmax"]

IMPLEMENTATIONS: dict[str, tuple[str, ...]] = {"cpu": ("cpu",), "cuda": ("triton",)}


def softmax(
    x: torch.Tensor,
    *,
    lengths: torch.Tensor | None = None,
    causal: bool = False,
    scale: float = 1.0,
    using: str | None = None,
) -> torch.Tensor:
    """Softmax over the last dimension of ``[batch, heads, queries, keys]``.

    Args:
        lengths: ``[batch]``, int64: the number of keys of each sequence; further keys are padding.
        causal: query i sees keys up to i, as in ``F.scaled_dot_product_attention``.
        scale: of the scores.

    >>> sl.nn.softmax(torch.zeros(1, 1, 2, 2), causal=True)
    tensor([[[[1.0000, 0.0000],
              [0.5000, 0.5000]]]])
    """
    check_tensors("softmax", {"x": x, "lengths": lengths}, optional=("lengths",), exactly={"lengths": torch.int64})
    if x.dim() != 4:
        raise ValueError(f"x has shape {tuple(x.shape)}: give it as [batch, heads, queries, keys]")
    if lengths is not None and lengths.shape != x.shape[:1]:
        raise ValueError(f"lengths has shape {tuple(lengths.shape)}: give one int64 for each of {len(x)} sequences")
    return _softmax(x, lengths, causal, float(scale), using)[0]


def _forward(
    x: torch.Tensor, lengths: torch.Tensor | None, causal: bool, scale: float, using: str | None
) -> list[torch.Tensor]:
    with on(x.device):
        return [rows.cast(serving("softmax", x, using).forward(x, lengths, causal, scale), x.dtype)]


def _backward(y: torch.Tensor, causal: bool, scale: float, using: str | None, dy: torch.Tensor) -> list[torch.Tensor]:
    with on(y.device):
        return [rows.cast(serving("softmax", y, using).backward(y, causal, scale, dy), y.dtype)]


_softmax = differentiable(
    "softmax",
    forward=_forward,
    forward_fake=lambda x, *_: [rows.like(x)],
    backward=_backward,
    backward_fake=lambda y, *_: [rows.like(y)],
    backward_reference=lambda y, causal, scale, using, dy: [reference.backward(y, causal, scale, dy)],
    keep=lambda inputs, outputs: (outputs[0], *inputs[2:]),
)


class reference(Plain):
    """In plain torch."""

    @staticmethod
    def forward(x: torch.Tensor, lengths: torch.Tensor | None, causal: bool, scale: float) -> torch.Tensor:
        hidden = torch.zeros(x.shape[-2:], dtype=torch.bool, device=x.device)
        if causal:
            hidden = ~torch.ones_like(hidden).tril()
        if lengths is not None:
            hidden = hidden | (torch.arange(x.shape[-1], device=x.device) >= lengths[:, None, None, None])
        scores = (rows.wide(x) * scale).masked_fill(hidden, -torch.inf)
        return torch.softmax(scores, -1).masked_fill(hidden, 0).to(x.dtype)

    @staticmethod
    def backward(y: torch.Tensor, causal: bool, scale: float, dy: torch.Tensor) -> torch.Tensor:
        p, d = rows.wide(y), rows.wide(dy)
        return (scale * p * (d - (p * d).sum(-1, keepdim=True))).to(y.dtype)


class cpu(native.Compiled, softmax="pipifllllpi", softmax_backward="piiflllppi"):
    """By softmax.cpp."""

    @staticmethod
    def forward(x: torch.Tensor, lengths: torch.Tensor | None, causal: bool, scale: float) -> torch.Tensor:
        x = native.readable(x)
        y = rows.like(x)
        lengths = None if lengths is None else lengths.contiguous()
        per_sequence = x.shape[1] * x.shape[2]
        where = (x.shape[0] * per_sequence, per_sequence, *x.shape[2:], y, threads())
        cpu.library().softmax(x, native.DTYPES[x.dtype], lengths, causal, scale, *where)
        return y

    @staticmethod
    def backward(y: torch.Tensor, causal: bool, scale: float, dy: torch.Tensor) -> torch.Tensor:
        y, dy = native.readable(y), native.readable(dy)
        dx = rows.like(y)
        count, columns = rows.sizes(y)
        where = (count, y.shape[2], columns, dy, dx, threads())
        cpu.library().softmax_backward(y, native.DTYPES[y.dtype], causal, scale, *where)
        return dx
