"""y = gelu(x + b) over rows, forward and backward in one pass each (arXiv 1606.08415).

With z = x + b (b may be missing), Φ and φ the standard normal distribution and density:

- exact: y = z·Φ(z);  dz = dy·(Φ(z) + z·φ(z)).
- "tanh": y = z·σ(2u), u = √(2/π)·(z + 0.044715·z³), which is 0.5·z·(1 + tanh u);  dz = dy·(σ + z·σ·(1 − σ)·2u').
- dx = dz;  db = Σ_rows dz, summed in an order that does not depend on the number of threads.

x, y and their gradients are ``[..., columns]`` in fp32, bf16 or fp16 (float64 by plain torch), computed in fp32; b is
``[columns]``. Bytes moved per element: x and y forward, x, dy and dx backward, 8 and 12 in fp32; plain torch moves 16 and
24 with a bias. Operations: an exponential, one or two divisions and a dozen more, some 20 to 30. Only x and b are saved.

``using`` names one implementation ("cpu", "triton", "reference"), for tests.
"""

from __future__ import annotations

import torch

from shardlib.kernels.common import rows
from shardlib.kernels.common.arguments import check_rows, check_tensors
from shardlib.kernels.common.dispatch import on, serving
from shardlib.kernels.common.operators import differentiable
from shardlib.kernels.gelu import reference

IMPLEMENTATIONS = {"cpu": ("cpu",), "cuda": ("triton",)}


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
        return [serving("gelu", x, using).forward(x, bias, tanh).to(x.dtype)]


def _backward(
    x: torch.Tensor, bias: torch.Tensor | None, tanh: bool, using: str | None, dy: torch.Tensor
) -> list[torch.Tensor]:
    with on(x.device):
        gradients = serving("gelu", x, using).backward(x, bias, tanh, dy)
    return [gradient.to(value.dtype) for gradient, value in zip(gradients, (x, bias)) if value is not None]


def _backward_reference(x, bias, tanh, using, dy):
    return reference.backward(x, bias, tanh, dy)


_gelu = differentiable(
    "gelu",
    forward=_forward,
    forward_fake=lambda x, *_: [rows.like(x)],
    backward=_backward,
    backward_fake=lambda x, bias, *_: [rows.like(value) for value in (x, bias) if value is not None],
    backward_reference=_backward_reference,
)
