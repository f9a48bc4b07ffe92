"""Matrix products in 8 bits: each factor is divided by its largest magnitude and rounded to an 8-bit float, the product is
summed in fp32 and multiplied by both scales (FP8 formats for deep learning, arXiv 2209.05433).

Values and weights are rounded to e4m3 (3 bits of mantissa), gradients to e5m2 (a larger range). Derivatives are those of the
product without rounding, each of them a product in 8 bits again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

VALUES, GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2
_MULTIPLE = 16  # of which products in 8 bits need their inner size and their number of columns on a GPU
_RESULTS = (torch.bfloat16, torch.float16, torch.float32)


def scaled_matmul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x @ weight`` in 8 bits.

    Args:
        x: (..., k).
        weight: (k, n).

    Returns:
        (..., n), in the dtype of ``x``.

    >>> x, weight = torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0], [3.0]])
    >>> sl.nn.scaled_matmul(x, weight)  # 1/3 of the weight's scale is no 8-bit number
    tensor([[6.9643]])
    """
    product = _Product.apply(x.reshape(math.prod(x.shape[:-1]), x.shape[-1]), weight, VALUES, VALUES)
    return product.view(*x.shape[:-1], weight.shape[1])


def scaled_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``F.linear(x, weight, bias)``, whose product is `scaled_matmul`'s."""
    y = scaled_matmul(x, weight.t())
    return y if bias is None else y + bias


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(a: torch.Tensor, b: torch.Tensor, kind_of_a: torch.dtype, kind_of_b: torch.dtype) -> torch.Tensor:
        return _multiplied(a, b, kind_of_a, kind_of_b)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        a, b, *ctx.kinds = inputs
        ctx.save_for_backward(a, b)
        ctx.save_for_forward(a, b)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (a, b), (kind_of_a, kind_of_b) = ctx.saved_tensors, ctx.kinds
        of_a = _Product.apply(grad, b.t(), GRADIENTS, kind_of_b) if ctx.needs_input_grad[0] else None
        of_b = _Product.apply(a.t(), grad, kind_of_a, GRADIENTS) if ctx.needs_input_grad[1] else None
        return of_a, of_b, None, None

    @staticmethod
    def jvp(ctx: Any, of_a: torch.Tensor | None, of_b: torch.Tensor | None, *_: Any) -> Any:
        (a, b), kinds = ctx.saved_tensors, ctx.kinds
        moves = [(of_a, b)] * (of_a is not None) + [(a, of_b)] * (of_b is not None)
        return sum(_Product.apply(*factors, *kinds) for factors in moves)

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], a: torch.Tensor, b: torch.Tensor, *kinds: torch.dtype) -> Any:
        """One product for each element of the batch, since each has scales of its own."""
        take: Callable[[torch.Tensor, int | None, int], torch.Tensor] = lambda x, dim, i: (  # noqa: E731
            x if dim is None else x.select(dim, i)
        )
        each = [_Product.apply(take(a, dims[0], i), take(b, dims[1], i), *kinds) for i in range(info.batch_size)]
        return torch.stack(each), 0


def _multiplied(a: torch.Tensor, b: torch.Tensor, kind_of_a: torch.dtype, kind_of_b: torch.dtype) -> torch.Tensor:
    (rows, inner), columns = a.shape, b.shape[1]
    if not rows * inner * columns:
        return a.new_zeros(rows, columns)
    more, wider = -inner % _MULTIPLE, -columns % _MULTIPLE
    left, scale_of_left = _scaled(F.pad(a, (0, more)) if more else a, kind_of_a)
    # The second factor lies column by column.
    right, scale_of_right = _scaled(F.pad(b.t(), (0, more, 0, wider)) if more or wider else b.t(), kind_of_b)
    whole = F.ScalingType.TensorWise
    dtype = a.dtype if a.dtype in _RESULTS else torch.float32
    y = F.scaled_mm(left, right.t(), scale_of_left, whole, scale_of_right, whole, output_dtype=dtype)
    return y[:, :columns].to(a.dtype)


def _scaled(x: torch.Tensor, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """``x`` in 8 bits, row by row, and its scale: 0-d, in fp32."""
    largest = x.abs().amax().float()
    scale = torch.where(largest == 0, 1.0, largest / torch.finfo(kind).max)
    return (x.float() / scale).to(kind).contiguous(), scale
