"""y = gelu(x + b) over rows, forward and backward in one pass each (arXiv 1606.08415).

With z = x + b (b may be missing), Φ and φ the standard normal distribution and density:

- exact: y = z·Φ(z);  dz = dy·(Φ(z) + z·φ(z)).
- "tanh": y = z·σ(2u), u = √(2/π)·(z + 0.044715·z³), which is 0.5·z·(1 + tanh u);  dz = dy·(σ + z·σ·(1 − σ)·2u').
- dx = dz;  db = Σ_rows dz, summed in an order that does not depend on the number of threads.

x, y and their gradients are ``[..., columns]`` in fp32, bf16 or fp16 (float64 by plain torch), computed in fp32; b is
``[columns]``. Bytes moved per element: x and y forward, x, dy and dx backward, 8 and 12 in fp32; plain torch moves 16 and
24 with a bias. Operations: an exponential, one or two divisions and a dozen more, some 20 to 30. Only x and b are saved.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from shardlib.common.thresholds import threads
from shardlib.kernels.common import native, results, rows
from shardlib.kernels.common.arguments import check_rows, check_tensors
from shardlib.kernels.common.dispatch import Plain, on, serving
from shardlib.kernels.common.operators import differentiable

__all__ = ["gelu"]

IMPLEMENTATIONS: dict[str, tuple[str, ...]] = {"cpu": ("cpu",), "cuda": ("triton",)}


def gelu(
    x: torch.Tensor, bias: torch.Tensor | None = None, *, approximate: str = "none", using: str | None = None
) -> torch.Tensor:
    """``F.gelu(x + bias, approximate=approximate)``, ``[..., columns]``.

    Args:
        bias: ``[columns]``.
        approximate: "none" or "tanh", as torch's.

    >>> sl.nn.gelu(torch.tensor([[-1.0, 0.0, 1.0]]), torch.zeros(3))
    tensor([[-0.1587,  0.0000,  0.8413]])
    """
    if approximate not in ("none", "tanh"):
        raise ValueError(f"gelu(approximate={approximate!r}): use 'none' or 'tanh'")
    check_tensors("gelu", {"x": x, "bias": bias}, optional=("bias",))
    check_rows("gelu", x)
    rows.check_vector("bias", bias, x)
    return _gelu(x, bias, approximate == "tanh", using)[0]


def _forward(x: torch.Tensor, bias: torch.Tensor | None, tanh: bool, using: str | None) -> list[torch.Tensor]:
    with on(x.device):
        return [rows.cast(serving("gelu", x, using).forward(x, bias, tanh), x.dtype)]


def _backward(
    x: torch.Tensor, bias: torch.Tensor | None, tanh: bool, using: str | None, dy: torch.Tensor
) -> list[torch.Tensor]:
    with on(x.device):
        gradients = serving("gelu", x, using).backward(x, bias, tanh, dy)
    return [rows.cast(gradient, value.dtype) for gradient, value in zip(gradients, (x, bias)) if value is not None]


_gelu = differentiable(
    "gelu",
    forward=_forward,
    forward_fake=lambda x, *_: [rows.like(x)],
    backward=_backward,
    backward_fake=lambda x, bias, *_: [rows.like(value) for value in (x, bias) if value is not None],
    backward_reference=lambda x, bias, tanh, using, dy: reference.backward(x, bias, tanh, dy),
)


class reference(Plain):
    """In plain torch."""

    @staticmethod
    def forward(x: torch.Tensor, bias: torch.Tensor | None, tanh: bool) -> torch.Tensor:
        return F.gelu(_sum(x, bias), approximate="tanh" if tanh else "none").to(x.dtype)

    @staticmethod
    def backward(x: torch.Tensor, bias: torch.Tensor | None, tanh: bool, dy: torch.Tensor) -> list[torch.Tensor]:
        z = _sum(x, bias)
        if tanh:
            s = torch.sigmoid(math.sqrt(8 / math.pi) * (z + 0.044715 * z**3))
            slope = s + z * s * (1 - s) * math.sqrt(8 / math.pi) * (1 + 3 * 0.044715 * z**2)
        else:
            slope = torch.special.ndtr(z) + z * torch.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
        dz = dy * slope
        return [dz.to(x.dtype)] if bias is None else [dz.to(x.dtype), rows.total(dz).to(bias.dtype)]


def _sum(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return rows.wide(x) if bias is None else rows.wide(x) + bias


class cpu(native.Compiled, gelu="pipillpi", gelu_backward="pipipllppi"):
    """By gelu.cpp."""

    @staticmethod
    def forward(x: torch.Tensor, bias: torch.Tensor | None, tanh: bool) -> torch.Tensor:
        x = native.readable(x)
        y = results.like(x)
        where = (*rows.sizes(x), y, threads())
        cpu.library().gelu(x, native.DTYPES[x.dtype], native.floats(bias), tanh, *where)
        return y

    @staticmethod
    def backward(x: torch.Tensor, bias: torch.Tensor | None, tanh: bool, dy: torch.Tensor) -> list[torch.Tensor]:
        x, dy = native.readable(x), native.readable(dy)
        dx = results.like(x)
        dbias = None if bias is None else torch.empty(bias.shape)
        where = (*rows.sizes(x), dx, dbias, threads())
        cpu.library().gelu_backward(x, native.DTYPES[x.dtype], native.floats(bias), tanh, dy, *where)
        return [dx] if dbias is None else [dx, dbias]
