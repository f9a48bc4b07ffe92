"""y = x Wᵀ + b of few rows x, where reading W takes longest: W is plain, or quantised to 8 or 4 bits.

W stays in its bits in memory, is read once for up to 32 rows of x, and becomes floats in registers or in the cache. x is
``[..., inputs]`` and y ``[..., outputs]``, in fp32 or bf16 (fp16 and float64 by plain torch, which makes a quantised W
whole), computed in fp32. Bytes moved: those of W, which for a quantised one are bits / 8 + 4 / block for each element.
Operations: 2·rows·inputs·outputs. More rows are a product of torch's, for which a quantised W is made whole. Compiled, an
output has the same bits among any other rows, up to 32. Nothing has gradients.

Of experts, each has a quantised W for a range of rows, as in `grouped_matmul`.

On a CPU with AMX tiles, a W of bf16 is read straight into tiles. Elsewhere, and in fp32, W meets rows of x in vectors.

``using`` names one implementation ("cpu", "reference"), for tests.
"""

from __future__ import annotations

from typing import NoReturn

import torch

from shardlib.common._compat import differentiated
from shardlib.kernels.common.arguments import FLOATS, check_tensors
from shardlib.kernels.common.dispatch import serving
from shardlib.kernels.grouped_matmul.reference import add
from shardlib.kernels.thin_matmul.arguments import Matrix

IMPLEMENTATIONS = {"cpu": ("cpu",)}


def thin_matmul(
    x: torch.Tensor, weight: torch.Tensor | Matrix, bias: torch.Tensor | None = None, *, using: str | None = None
) -> torch.Tensor:
    """``F.linear(x, weight, bias)``, ``[..., outputs]``, without gradients.

    Args:
        x: ``[..., inputs]``, of the dtype of ``weight``.
        weight: ``[outputs, inputs]``, a tensor or a `QuantizedMatrix`.
        bias: ``[outputs]``.

    Raises:
        ValueError: shapes or dtypes that do not fit, or a tensor that needs gradients where they are recorded.

    >>> from shardlib.kernels.thin_matmul import QuantizedMatrix, thin_matmul
    >>> thin_matmul(torch.ones(1, 16), QuantizedMatrix.of(torch.ones(3, 16)))
    tensor([[16., 16., 16.]])
    >>> thin_matmul(torch.ones(1, 2), torch.eye(2))
    tensor([[1., 1.]])
    """
    # One condition: weights evict Python's data from the caches, so each step of the checks waits for memory.
    values = weight.scales if isinstance(weight, Matrix) else weight
    shape, dtype, device = weight.shape, weight.dtype, values.device
    if not (
        dtype in FLOATS
        and x.dtype == dtype
        and x.device == device
        and x.dim()
        and len(shape) == 2
        and x.shape[-1] == shape[1]
        and (bias is None or (bias.dtype == dtype and bias.device == device and bias.shape == shape[:1]))
        and not (torch.is_grad_enabled() and any(t is not None and differentiated(t) for t in (x, values, bias)))
    ):
        _refuse(x, weight, values, bias)
    return serving("thin_matmul", x, using).product(x, weight, bias)


def grouped_thin_matmul(
    x: torch.Tensor,
    weight: Matrix,
    offsets: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    using: str | None = None,
) -> torch.Tensor:
    """`shardlib.kernels.grouped_matmul` with quantised weights, without gradients: ``[R, outputs]``.

    Args:
        x: ``[R, inputs]``, sorted by expert, of the dtype of ``weight``.
        weight: ``[experts, outputs, inputs]``.
        offsets: int64 ``[experts]``, the end of each expert's rows. Rows behind the last one give 0.
        bias: ``[experts, outputs]``, of the dtype of ``x``.

    Raises:
        ValueError: shapes, dtypes or offsets do not fit, or ``x`` needs gradients where they are recorded.
    """
    check_tensors("grouped_thin_matmul", {"x": x, "offsets": offsets}, exactly={"offsets": torch.int64})
    fits = x.dim() == 2 and len(weight.shape) == 3 and offsets.dim() == 1 and len(offsets) == len(weight)
    if not fits or x.shape[1] != weight.shape[2] or x.dtype != weight.dtype:
        raise ValueError(
            f"x {tuple(x.shape)}, {x.dtype}, weight {tuple(weight.shape)}, {weight.dtype}, and offsets "
            f"{tuple(offsets.shape)}: they must be [rows, inputs], [experts, outputs, inputs] and [experts], x and weight of "
            "one dtype"
        )
    if torch.is_grad_enabled() and differentiated(x):
        raise ValueError(
            "grouped_thin_matmul has no gradients: call it under torch.no_grad(), or keep the weights plain"
        )
    y = serving("thin_matmul", x, using).grouped(x, weight, offsets)
    if bias is not None:
        add(y, bias, offsets)
    return y


def _refuse(
    x: torch.Tensor, weight: torch.Tensor | Matrix, values: torch.Tensor, bias: torch.Tensor | None
) -> NoReturn:
    check_tensors("thin_matmul", {"x": x, "weight": values, "bias": bias}, optional=("bias",))
    if x.dim() == 0 or len(weight.shape) != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"x {tuple(x.shape)} and weight {tuple(weight.shape)}: they must be [..., inputs] and [outputs, inputs]"
        )
    if x.dtype != weight.dtype:
        raise ValueError(f"x is {x.dtype}, and weight {weight.dtype}: they must agree; cast x, or take another weight")
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != x.dtype):
        raise ValueError(
            f"bias {tuple(bias.shape)}, {bias.dtype}, and weight {tuple(weight.shape)}, {weight.dtype}: bias must be "
            "[outputs], of the same dtype"
        )
    raise ValueError("thin_matmul has no gradients: call it under torch.no_grad(), or F.linear")
