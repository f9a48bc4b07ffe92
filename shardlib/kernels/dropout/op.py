"""y = r + m ⊙ (x + b) / (1 − p) over rows, with the mask m drawn from a counter (b and r may be missing).

Element e of the whole tensor is kept where `shardlib.kernels.counter.random_bits` of (seed, e) is at least ⌊p·2^24⌋.
Backward draws the same mask again, so x is not saved: dx = m ⊙ dy / (1 − p);  db = Σ_rows dx, in an order that does not
depend on the number of threads;  dr = dy.

x, r, y and their gradients are ``[..., columns]`` in fp32, bf16 or fp16 (float64 by plain torch), computed in fp32; b is
``[columns]``. Bytes moved per element in fp32: x, r and y forward, dy and dx backward, 12 and 8; plain torch moves 29 and
13 with a mask of bytes, and some 200 if it draws this mask. Operations: 20 of integers for the mask.

``using`` names one implementation ("cpu", "triton", "reference"), for tests.
"""

from __future__ import annotations

import torch

from shardlib.kernels.common import rows
from shardlib.kernels.common.arguments import check_rows, check_tensors
from shardlib.kernels.common.dispatch import on, serving
from shardlib.kernels.common.operators import differentiable
from shardlib.kernels.counter import signed, spread
from shardlib.kernels.dropout import reference
from shardlib.kernels.dropout.arguments import Draw

IMPLEMENTATIONS = {"cpu": ("cpu",), "cuda": ("triton",)}


def dropout(
    x: torch.Tensor,
    draw: Draw,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    using: str | None = None,
) -> torch.Tensor:
    """``residual + dropout(x + bias)``, ``[..., columns]``.

    Args:
        residual: like ``x``.
        bias: ``[columns]``.
    """
    given = {"x": x, "bias": bias, "residual": residual, "starts": draw.starts}
    check_tensors("dropout", given, optional=("bias", "residual", "starts"), exactly={"starts": torch.int64})
    check_rows("dropout", x)
    rows.check_vector("bias", bias, x)
    if draw.starts is not None and draw.starts.numel() != rows.sizes(x)[0]:
        raise ValueError(
            f"starts has {draw.starts.numel()} indices for the {rows.sizes(x)[0]} rows of x: give one per row"
        )
    draw = Draw(float(draw.p), signed(draw.seed), draw.start, draw.starts)
    if residual is None:
        return _alone(x, bias, *draw, using)[0]
    rows.check_like("residual", residual, "x", x)
    return _onto(x, residual, bias, *draw, using)[0]


def _spread(draw: Draw) -> Draw:
    """``draw`` with its seed spread, as implementations take it."""
    return draw._replace(seed=spread(draw.seed))


def _forward_alone(x: torch.Tensor, bias: torch.Tensor | None, draw: Draw, using: str | None) -> list[torch.Tensor]:
    return _forward(x, None, bias, draw, using)


def _forward(
    x: torch.Tensor, residual: torch.Tensor | None, bias: torch.Tensor | None, draw: Draw, using: str | None
) -> list[torch.Tensor]:
    with on(x.device):
        return [serving("dropout", x, using).forward(x, residual, bias, _spread(draw)).to(x.dtype)]


def _backward(bias: torch.Tensor | None, draw: Draw, using: str | None, dy: torch.Tensor) -> list[torch.Tensor]:
    with on(dy.device):
        gradients = serving("dropout", dy, using).backward(bias, _spread(draw), dy)
    return [gradient.to(value.dtype) for gradient, value in zip(gradients, (dy, bias)) if value is not None]


def _backward_reference(bias, draw, using, dy):
    return reference.backward(bias, _spread(draw), dy)


def _backward_fake(bias, draw, using, dy):
    return [rows.like(value) for value in (dy, bias) if value is not None]


_alone = differentiable(
    "dropout",
    forward=_forward_alone,
    forward_fake=lambda x, *_: [rows.like(x)],
    backward=_backward,
    backward_fake=_backward_fake,
    backward_reference=_backward_reference,
    keep=lambda inputs, outputs: inputs[1:],
)
_onto = differentiable(
    "dropout_onto",
    forward=_forward,
    forward_fake=lambda x, *_: [rows.like(x)],
    backward=_backward,
    backward_fake=_backward_fake,
    backward_reference=_backward_reference,
    keep=lambda inputs, outputs: inputs[2:],
    per_input=lambda computed, incoming: [computed[0], incoming[0], *computed[1:]],
)
