"""y = x Wᵀ + b, where W is quantised blockwise to 8 or 4 bits (see `shardlib.kernels.quantize`).

W stays in its bits in memory: it passes once for every 64 rows of x, and becomes floats panel by panel, in the cache. x is
``[..., inputs]`` and y ``[..., outputs]``, in fp32 or bf16 (fp16 and float64 by plain torch, which makes W whole), computed
in fp32. Bytes moved for few rows: bits / 8 + 4 / block for each element of W. Operations: 2·rows·inputs·outputs, and a
product for each element. Compiled, an output has the same bits among any number of rows. Nothing has gradients.

``using`` names one implementation ("cpu", "reference"), for tests.
"""

from __future__ import annotations

import torch

from shardlib.kernels.common.arguments import check_tensors
from shardlib.kernels.common.dispatch import on, serving
from shardlib.kernels.quantized_matmul.arguments import Matrix

IMPLEMENTATIONS = {"cpu": ("cpu",)}


def quantized_matmul(
    x: torch.Tensor, weight: Matrix, bias: torch.Tensor | None = None, *, using: str | None = None
) -> torch.Tensor:
    """``F.linear(x, weight, bias)`` of a `QuantizedMatrix`, ``[..., outputs]``.

    Args:
        x: ``[..., inputs]``, of the dtype of ``weight``.
        weight: ``[outputs, inputs]``.
        bias: ``[outputs]``.

    Raises:
        ValueError: shapes or dtypes that do not fit.

    >>> from shardlib.kernels.quantized_matmul import QuantizedMatrix, quantized_matmul
    >>> quantized_matmul(torch.ones(1, 16), QuantizedMatrix.of(torch.ones(3, 16)))
    tensor([[16., 16., 16.]])
    """
    check_tensors("quantized_matmul", {"x": x, "scales": weight.scales, "bias": bias}, optional=("bias",))
    if x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"x {tuple(x.shape)} and weight {tuple(weight.shape)}: they must be [..., inputs] and [outputs, inputs]"
        )
    if x.dtype != weight.dtype:
        raise ValueError(
            f"x is {x.dtype}, and weight {weight.dtype}: they must agree; cast x, or quantise a weight of its dtype"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias {tuple(bias.shape)} and weight {tuple(weight.shape)}: bias must be [outputs]")
    with on(x.device):
        return serving("quantized_matmul", x, using).product(x, weight, bias)
