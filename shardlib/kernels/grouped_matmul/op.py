"""y_r = x_r W_eᵀ + b_e for the rows r of expert e, which are a range: as one product, or with a product for each expert.

With o_e the end of the rows of expert e, and o_(e−1) their beginning (0 for the first):

- forward: y_r = x_r W_eᵀ + b_e for o_(e−1) ≤ r < o_e, and 0 for rows from the last end on.
- backward: dx_r = dy_r W_e, 0 for rows from the last end on;  dW_e = Σ_r dy_rᵀ x_r and db_e = Σ_r dy_r over the
  expert's rows, 0 without any.

x is ``[R, inner]``, W ``[E, outer, inner]``, b, where there is one, ``[E, outer]`` and y ``[R, outer]``, of one dtype: fp32,
bf16, fp16 or float64. Sums are in fp32 or wider. Operations: 2·R·inner·outer, and twice that in backward. Bytes moved beside
those of one product: the matrices of the other experts that have rows, and of all of them in dW.

On a CPU with AMX tiles, bf16 has a kernel: it packs a block of a matrix once, in the order in which tiles are read, for all
rows of the expert. On a GPU, ``F.grouped_mm`` multiplies bf16 with rows of multiples of 16 bytes. Everywhere else each
expert's product is one of torch's, written where the result belongs.

``using`` names one implementation ("cpu", "cuda", "reference"), for tests.
"""

from __future__ import annotations

import torch
from torch.overrides import handle_torch_function, has_torch_function

from shardlib.kernels.common import rows
from shardlib.kernels.common.arguments import check_tensors
from shardlib.kernels.common.dispatch import on, serving
from shardlib.kernels.common.operators import autocast_as_a_product, counted, differentiable
from shardlib.kernels.grouped_matmul import reference

IMPLEMENTATIONS = {"cpu": ("cpu",), "cuda": ("cuda",)}


def grouped_matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    using: str | None = None,
) -> torch.Tensor:
    """``F.linear`` of each expert's rows with its matrix and its bias, ``[R, outer]``. Autocast as in `F.linear`.

    Args:
        x: ``[R, inner]``, sorted by expert.
        weight: ``[E, outer, inner]``, of the dtype of ``x``.
        offsets: int64 ``[E]``, the end of each expert's rows, such as ``counts.cumsum(0)``.
        bias: ``[E, outer]``, of the same dtype.

    Raises:
        ValueError: shapes, dtypes or offsets do not fit.

    >>> from shardlib.kernels.grouped_matmul import grouped_matmul
    >>> x, weight = torch.ones(3, 1), torch.tensor([[[1.0]], [[2.0]], [[3.0]]])
    >>> grouped_matmul(x, weight, torch.tensor([2, 2, 3])).flatten()  # the second expert has no row
    tensor([1., 1., 3.])
    """
    if has_torch_function((weight,)):  # weights that compute for themselves, such as quantised ones
        return handle_torch_function(grouped_matmul, (weight,), x, weight, offsets, bias, using=using)
    given = {"x": x, "weight": weight, "offsets": offsets, "bias": bias}
    check_tensors("grouped_matmul", given, exactly={"offsets": torch.int64}, optional=("bias",))
    fits = x.dim() == 2 and weight.dim() == 3 and offsets.dim() == 1 and len(offsets) == len(weight) > 0
    if not fits or x.shape[1] != weight.shape[2]:
        raise ValueError(
            f"x {tuple(x.shape)}, weight {tuple(weight.shape)} and offsets {tuple(offsets.shape)}: they must be "
            "[rows, inner], [experts, outer, inner] and [experts]"
        )
    if bias is not None and bias.shape != weight.shape[:2]:
        raise ValueError(f"bias is {tuple(bias.shape)}, and weight {tuple(weight.shape)}: it must be [experts, outer]")
    x, weight, *biases = autocast_as_a_product(*(t for t in (x, weight, bias) if t is not None))
    bias = biases[0] if biases else None
    if {t.dtype for t in (weight, *biases)} != {x.dtype}:
        which = f"weight {weight.dtype}" + (f", bias {bias.dtype}" if bias is not None else "")
        raise ValueError(f"x is {x.dtype}, and {which}: they must agree; cast them to one")
    return _grouped_matmul(x, weight, offsets, bias, using)[0]


def _forward(
    x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, bias: torch.Tensor | None, using: str | None
) -> list[torch.Tensor]:
    with on(x.device):
        return [serving("grouped_matmul", x, using).forward(x, weight, offsets, bias)]


def _backward(
    x: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor,
    bias: torch.Tensor | None,
    using: str | None,
    dy: torch.Tensor,
) -> list[torch.Tensor]:
    with on(x.device):
        gradients = serving("grouped_matmul", x, using).backward(x, weight, offsets, dy)
        return gradients if bias is None else [*gradients, reference.sums(dy, offsets)]


_grouped_matmul = differentiable(
    "grouped_matmul",
    forward=_forward,
    forward_fake=lambda x, weight, *_: [x.new_empty(x.shape[0], weight.shape[1])],
    backward=_backward,
    backward_fake=lambda x, weight, offsets, bias, *_: [rows.like(t) for t in (x, weight, bias) if t is not None],
    backward_reference=lambda x, weight, offsets, bias, using, dy: reference.plain_backward(
        x, weight, offsets, bias, dy
    ),
)
counted(
    "grouped_matmul",
    forward=lambda x, weight, *_, **__: 2 * x[0] * x[1] * weight[1],
    backward=lambda x, weight, *_, **__: 4 * x[0] * x[1] * weight[1],
)
