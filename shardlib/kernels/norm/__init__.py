"""LayerNorm (arXiv 1607.06450) and RMSNorm (arXiv 1910.07467) of rows x, or of a sum x + r, which is returned too.

Over a row of d elements, with s = x (or x + r, rounded to x's dtype), μ = mean(s) (0 for RMSNorm) and
ρ = 1/√(mean((s − μ)²) + ε):

- forward: ŝ = (s − μ)·ρ;  y = ŝ·w + b.
- backward: with g = dy·w:  ds = ρ·(g − mean(g) − ŝ·mean(g·ŝ)) (no mean(g) for RMSNorm), plus the gradient of the returned
  sum;  dx = dr = ds;  dw = Σ_rows dy·ŝ;  db = Σ_rows dy, in an order that does not depend on the number of threads.

x, r, y and s are ``[..., d]`` in fp32, bf16 or fp16 (float64 by plain torch), all sums in fp32; w and b are ``[d]``, of
any floating dtype. Only s and w are saved: backward reads the rows anyway, and computes μ and ρ from them again.
Bytes moved per element in fp32: forward 8 (x, y), of a sum 16 (x, r, s, y); backward 12 (s, dy, ds), of a sum 16. Plain
torch adds first, 12 bytes more, and adds gradients of the sum, 12 more. Operations: 8 forward, some 15 backward.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from shardlib.common.thresholds import threads
from shardlib.kernels.common import native, rows
from shardlib.kernels.common.arguments import check_rows, check_tensors
from shardlib.kernels.common.dispatch import Plain, on, serving
from shardlib.kernels.common.operators import differentiable

__all__ = ["add_layer_norm", "add_rms_norm", "layer_norm", "rms_norm"]

IMPLEMENTATIONS: dict[str, tuple[str, ...]] = {"cpu": ("cpu",), "cuda": ("triton",)}


class Norm(NamedTuple):
    """A norm of rows of d elements.

    Attributes:
        weight, bias: ``[d]``.
        centred: whether the mean is subtracted first, as in LayerNorm.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    eps: float
    centred: bool


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    eps: float = 1e-5,
    using: str | None = None,
) -> torch.Tensor:
    """``F.layer_norm(x, x.shape[-1:], weight, bias, eps)``, ``[..., d]``.

    Args:
        weight, bias: ``[d]``.

    >>> sl.nn.layer_norm(torch.tensor([[1.0, 3.0]]), torch.ones(2), torch.zeros(2))
    tensor([[-1.0000,  1.0000]])
    """
    _check("layer_norm", {"x": x, "weight": weight, "bias": bias})
    return _alone(x, *Norm(weight, bias, eps, True), using)[0]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float = 1e-6, using: str | None = None) -> torch.Tensor:
    """``F.rms_norm(x, x.shape[-1:], weight, eps)``, ``[..., d]``.

    >>> sl.nn.rms_norm(torch.tensor([[3.0, 3.0]]), torch.ones(2))
    tensor([[1.0000, 1.0000]])
    """
    _check("rms_norm", {"x": x, "weight": weight})
    return _alone(x, *Norm(weight, None, eps, False), using)[0]


def add_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    eps: float = 1e-5,
    using: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`layer_norm` of ``x + residual``, and that sum; both are ``[..., d]`` of one dtype.

    >>> x, residual = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    >>> y, total = sl.nn.add_layer_norm(x, residual, torch.ones(8))
    >>> torch.equal(total, x + residual)
    True
    """
    _check("add_layer_norm", {"x": x, "residual": residual, "weight": weight, "bias": bias})
    y, total = _of_sum(x, residual, *Norm(weight, bias, eps, True), using)
    return y, total


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float = 1e-6, using: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rms_norm` of ``x + residual``, and that sum; both terms are ``[..., d]`` of one dtype.

    >>> x, residual = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    >>> y, total = sl.nn.add_rms_norm(x, residual, torch.ones(8))
    >>> torch.equal(total, x + residual)
    True
    """
    _check("add_rms_norm", {"x": x, "residual": residual, "weight": weight})
    y, total = _of_sum(x, residual, *Norm(weight, None, eps, False), using)
    return y, total


def _check(function: str, given: dict[str, torch.Tensor | None]) -> None:
    check_tensors(function, given, optional=("bias",))
    x, weight, bias = given["x"], given["weight"], given.get("bias")
    assert x is not None and weight is not None
    check_rows(function, x)
    rows.check_vector("weight", weight, x)
    rows.check_vector("bias", bias, x)
    if (residual := given.get("residual")) is not None:
        rows.check_like("residual", residual, "x", x)


def _forward_alone(x: torch.Tensor, norm: Norm, using: str | None) -> list[torch.Tensor]:
    with on(x.device):
        return [rows.cast(serving("norm", x, using).forward(x, norm), x.dtype)]


def _forward_of_sum(x: torch.Tensor, residual: torch.Tensor, norm: Norm, using: str | None) -> list[torch.Tensor]:
    with on(x.device):
        outputs = serving("norm", x, using).forward_of_sum(x, residual, norm)
    return [rows.cast(tensor, x.dtype) for tensor in outputs]


def _backward_alone(x: torch.Tensor, norm: Norm, using: str | None, dy: torch.Tensor) -> list[torch.Tensor]:
    return _backward(x, norm, using, dy, None)


def _backward(
    total: torch.Tensor, norm: Norm, using: str | None, dy: torch.Tensor, dtotal: torch.Tensor | None
) -> list[torch.Tensor]:
    with on(total.device):
        gradients = serving("norm", total, using).backward(total, norm, dy, dtotal)
    return [rows.cast(gradient, value.dtype) for gradient, value in zip(gradients, _differentiable(total, norm))]


def _backward_fake(total: torch.Tensor, norm: Norm, *_: object) -> list[torch.Tensor]:
    return [rows.like(value) for value in _differentiable(total, norm)]


def _differentiable(x: torch.Tensor, norm: Norm) -> list[torch.Tensor]:
    return [x, norm.weight] if norm.bias is None else [x, norm.weight, norm.bias]


def _backward_reference(total, norm, using, dy, dtotal=None):
    return reference.backward(total, norm, dy, dtotal)


_alone = differentiable(
    "norm",
    forward=_forward_alone,
    forward_fake=lambda x, *_: [rows.like(x)],
    backward=_backward_alone,
    backward_fake=_backward_fake,
    backward_reference=_backward_reference,
)


_of_sum = differentiable(
    "norm_of_sum",
    forward=_forward_of_sum,
    forward_fake=lambda x, *_: [rows.like(x), rows.like(x)],
    backward=_backward,
    backward_fake=_backward_fake,
    backward_reference=_backward_reference,
    keep=lambda inputs, outputs: (outputs[1], *inputs[2:]),
    per_input=lambda computed, incoming: [computed[0], *computed],
)


class reference(Plain):
    """In plain torch."""

    @staticmethod
    def forward(x: torch.Tensor, norm: Norm) -> torch.Tensor:
        y = _normed(x, norm)[0] * norm.weight
        return (y if norm.bias is None else y + norm.bias).to(x.dtype)

    @staticmethod
    def forward_of_sum(x: torch.Tensor, residual: torch.Tensor, norm: Norm) -> list[torch.Tensor]:
        total = (x + residual).contiguous()
        return [reference.forward(total, norm), total]

    @staticmethod
    def backward(total: torch.Tensor, norm: Norm, dy: torch.Tensor, dtotal: torch.Tensor | None) -> list[torch.Tensor]:
        weight, bias, _, centred = norm
        normed, rho = _normed(total, norm)
        dy = rows.wide(dy)
        g = dy * weight
        ds = g - normed * (g * normed).mean(-1, keepdim=True)
        if centred:
            ds = ds - g.mean(-1, keepdim=True)
        ds = ds * rho if dtotal is None else ds * rho + dtotal
        gradients = [ds.to(total.dtype), rows.total(dy * normed).to(weight.dtype)]
        return gradients if bias is None else [*gradients, rows.total(dy).to(bias.dtype)]


def _normed(x: torch.Tensor, norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
    """The normalised rows ŝ, and ρ."""
    x = rows.wide(x)
    if norm.centred:
        x = x - x.mean(-1, keepdim=True)
    rho = (x.square().mean(-1, keepdim=True) + norm.eps).rsqrt()
    return x * rho, rho


class cpu(native.Compiled, norm="ppippfillppi", norm_backward="pipfillpppppi"):
    """By norm.cpp."""

    @classmethod
    def load(cls, device: torch.device) -> str:
        return f"{native.description('norm')}; LayerNorm without a sum, forward: torch"

    @staticmethod
    def forward(x: torch.Tensor, norm: Norm) -> torch.Tensor:
        weight, bias, eps, centred = norm
        if centred and weight.dtype == x.dtype:  # torch's is as fast as memory
            bias = None if bias is None else rows.cast(bias, x.dtype)
            return F.layer_norm(x.contiguous(), weight.shape, weight, bias, eps)
        return _forward(x, None, norm)[0]

    @staticmethod
    def forward_of_sum(x: torch.Tensor, residual: torch.Tensor, norm: Norm) -> list[torch.Tensor]:
        if x.dtype == torch.float16:  # the kernel would read it as fp32 and not round the sum to fp16
            total = (x + residual).contiguous()
            return [*_forward(total, None, norm), total]
        return _forward(x, residual, norm)

    @staticmethod
    def backward(total: torch.Tensor, norm: Norm, dy: torch.Tensor, dtotal: torch.Tensor | None) -> list[torch.Tensor]:
        weight, bias, eps, centred = norm
        total, dy = native.readable(total), native.readable(dy)
        dtotal = None if dtotal is None else native.readable(dtotal)
        columns = weight.shape[0]
        ds, dweight, dbias = rows.like(total), torch.empty(columns), None if bias is None else torch.empty(columns)
        where = (*rows.sizes(total), dy, dtotal, ds, dweight, dbias, threads())
        cpu.library().norm_backward(total, native.DTYPES[total.dtype], native.floats(weight), eps, centred, *where)
        return [ds, dweight] if dbias is None else [ds, dweight, dbias]


def _forward(x: torch.Tensor, residual: torch.Tensor | None, norm: Norm) -> list[torch.Tensor]:
    weight, bias, eps, centred = norm
    x = native.readable(x)
    outputs = [rows.like(x)]
    total = None
    if residual is not None:
        residual, total = native.readable(residual), rows.like(x)
        outputs.append(total)
    vectors = (native.floats(weight), native.floats(bias))
    where = (*rows.sizes(x), outputs[0], total, threads())
    cpu.library().norm(x, residual, native.DTYPES[x.dtype], *vectors, eps, centred, *where)
    return outputs
