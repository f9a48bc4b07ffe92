"""y = r + m ⊙ (x + b) / (1 − p) over rows, with the mask m drawn from a counter (b and r may be missing).

Element e of the whole tensor is kept where `shardlib.kernels.counter.random_bits` of (seed, e) is at least ⌊p·2^24⌋.
Backward draws the same mask again, so x is not saved: dx = m ⊙ dy / (1 − p);  db = Σ_rows dx, in an order that does not
depend on the number of threads;  dr = dy.

x, r, y and their gradients are ``[..., columns]`` in fp32, bf16 or fp16 (float64 by plain torch), computed in fp32; b is
``[columns]``. Bytes moved per element in fp32: x, r and y forward, dy and dx backward, 12 and 8; plain torch moves 29 and
13 with a mask of bytes, and some 200 if it draws this mask. Operations: 20 of integers for the mask.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch

from shardlib.common.thresholds import threads
from shardlib.kernels import counter
from shardlib.kernels.common import native, rows
from shardlib.kernels.common.arguments import check_rows, check_tensors
from shardlib.kernels.common.dispatch import Plain, on, serving
from shardlib.kernels.common.operators import differentiable

__all__ = ["Draw", "dropout"]

IMPLEMENTATIONS: dict[str, tuple[str, ...]] = {"cpu": ("cpu",), "cuda": ("triton",)}


class DropoutDraw(NamedTuple):
    """A draw of the elements that are dropped.

    Attributes:
        p: the probability of an element to be dropped, in [0, 1).
        seed: of the random bits, modulo 2^64.
        start: the index of the first element; indices are consecutive.
        starts: the indices of the rows' first elements, int64, one per row, in place of ``start``.
    """

    p: float
    seed: int
    start: int = 0
    starts: torch.Tensor | None = None


def dropout(
    x: torch.Tensor,
    draw: DropoutDraw,
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
    draw = DropoutDraw(float(draw.p), counter.signed(draw.seed), draw.start, draw.starts)
    if residual is None:
        return _alone(x, bias, *draw, using)[0]
    rows.check_like("residual", residual, "x", x)
    return _onto(x, residual, bias, *draw, using)[0]


def _spread(draw: DropoutDraw) -> DropoutDraw:
    """``draw`` with its seed spread, as implementations take it."""
    return draw._replace(seed=counter.spread(draw.seed))


def _forward_alone(
    x: torch.Tensor, bias: torch.Tensor | None, draw: DropoutDraw, using: str | None
) -> list[torch.Tensor]:
    return _forward(x, None, bias, draw, using)


def _forward(
    x: torch.Tensor, residual: torch.Tensor | None, bias: torch.Tensor | None, draw: DropoutDraw, using: str | None
) -> list[torch.Tensor]:
    with on(x.device):
        return [rows.cast(serving("dropout", x, using).forward(x, residual, bias, _spread(draw)), x.dtype)]


def _backward(bias: torch.Tensor | None, draw: DropoutDraw, using: str | None, dy: torch.Tensor) -> list[torch.Tensor]:
    with on(dy.device):
        gradients = serving("dropout", dy, using).backward(bias, _spread(draw), dy)
    return [rows.cast(gradient, value.dtype) for gradient, value in zip(gradients, (dy, bias)) if value is not None]


def _backward_reference(bias, draw, using, dy):
    return reference.backward(bias, _spread(draw), dy)


def _backward_fake(bias, draw, using, dy):
    return [rows.like(value) for value in (dy, bias) if value is not None]


_operator = partial(
    differentiable,
    forward_fake=lambda x, *_: [rows.like(x)],
    backward=_backward,
    backward_fake=_backward_fake,
    backward_reference=_backward_reference,
)
_alone = _operator("dropout", forward=_forward_alone, keep=lambda inputs, outputs: inputs[1:])
_onto = _operator(
    "dropout_onto",
    forward=_forward,
    keep=lambda inputs, outputs: inputs[2:],
    per_input=lambda computed, incoming: [computed[0], incoming[0], *computed[1:]],
)


class reference(Plain):
    """In plain torch."""

    @staticmethod
    def forward(
        x: torch.Tensor, residual: torch.Tensor | None, bias: torch.Tensor | None, draw: DropoutDraw
    ) -> torch.Tensor:
        z = rows.wide(x) if bias is None else rows.wide(x) + bias
        y = z * _factor(z, draw)
        return (y if residual is None else y + residual).to(x.dtype).contiguous()

    @staticmethod
    def backward(bias: torch.Tensor | None, draw: DropoutDraw, dy: torch.Tensor) -> list[torch.Tensor]:
        dz = rows.wide(dy)
        dz = dz * _factor(dz, draw)
        return [dz.to(dy.dtype)] if bias is None else [dz.to(dy.dtype), rows.total(dz).to(bias.dtype)]


def _factor(x: torch.Tensor, draw: DropoutDraw) -> torch.Tensor:
    """0 where an element is dropped, 1 / (1 − p) where it is kept."""
    if draw.starts is None:
        index = torch.arange(draw.start, draw.start + x.numel(), device=x.device)
    else:
        index = (draw.starts.reshape(-1, 1) + torch.arange(x.shape[-1], device=x.device)).flatten()
    keep = counter.reference.random_bits(draw.seed, index) >= int(draw.p * 2**24)
    return (keep.to(x.dtype) / (1.0 - draw.p)).reshape(x.shape)


class cpu(native.Compiled, dropout="pippfillpllpi", dropout_backward="pifillpllppi"):
    """By dropout.cpp."""

    @staticmethod
    def forward(
        x: torch.Tensor, residual: torch.Tensor | None, bias: torch.Tensor | None, draw: DropoutDraw
    ) -> torch.Tensor:
        x = native.readable(x)
        residual = None if residual is None else native.readable(residual)
        y = rows.like(x)
        inputs = (x, native.DTYPES[x.dtype], residual, native.floats(bias))
        cpu.library().dropout(*inputs, *_drawn(draw), *rows.sizes(x), y, threads())
        return y

    @staticmethod
    def backward(bias: torch.Tensor | None, draw: DropoutDraw, dy: torch.Tensor) -> list[torch.Tensor]:
        dy = native.readable(dy)
        dx = rows.like(dy)
        dbias = None if bias is None else torch.empty(bias.shape)
        where = (*_drawn(draw), *rows.sizes(dy), dx, dbias, threads())
        cpu.library().dropout_backward(dy, native.DTYPES[dy.dtype], *where)
        return [dx] if dbias is None else [dx, dbias]


def _drawn(draw: DropoutDraw) -> tuple[Any, ...]:
    starts = None if draw.starts is None else draw.starts.contiguous()
    return 1.0 / (1.0 - draw.p), int(draw.p * 2**24), draw.seed, draw.start, starts
