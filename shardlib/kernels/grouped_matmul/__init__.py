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
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.overrides import handle_torch_function, has_torch_function

from shardlib.common.tensors import aligned
from shardlib.common.thresholds import threads
from shardlib.kernels.common import native, results
from shardlib.kernels.common import rows as lines
from shardlib.kernels.common.arguments import check_tensors
from shardlib.kernels.common.dispatch import Plain, on, serving
from shardlib.kernels.common.flops import counted
from shardlib.kernels.common.operators import autocast_as_a_product, differentiable

__all__ = ["grouped_matmul"]

IMPLEMENTATIONS: dict[str, tuple[str, ...]] = {"cpu": ("cpu",), "cuda": ("cuda",)}
_MATRICES, _SIZES = "plli", "pllll"  # of signatures: what `_matrices` and `_sizes` return
_BYTES = 16  # of which rows must be multiples for ``F.grouped_mm``
_OLDEST = (8, 0)  # compute capability that it supports


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
        return gradients if bias is None else [*gradients, sums(dy, offsets)]


_grouped_matmul = differentiable(
    "grouped_matmul",
    forward=_forward,
    forward_fake=lambda x, weight, *_: [x.new_empty(x.shape[0], weight.shape[1])],
    backward=_backward,
    backward_fake=lambda x, weight, offsets, bias, *_: [lines.like(t) for t in (x, weight, bias) if t is not None],
    backward_reference=lambda x, weight, offsets, bias, using, dy: reference.plain_backward(
        x, weight, offsets, bias, dy
    ),
)


counted(
    "grouped_matmul",
    forward=lambda x, weight, *_, **__: 2 * x[0] * x[1] * weight[1],
    backward=lambda x, weight, *_, **__: 4 * x[0] * x[1] * weight[1],
)


class reference(Plain):
    """In plain torch: one product an expert, written in place; `plain_backward` makes new tensors.

    An expert's rows are read from where an allocation begins, so that its product does not depend on the experts before it.
    """

    @staticmethod
    def forward(
        x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        y = results.empty(x, (len(x), weight.shape[1]))
        parts = ranges(offsets, len(x))
        for expert, (first, end) in enumerate(parts):
            if first == end:
                continue
            if bias is None:
                torch.mm(aligned(x[first:end]), weight[expert].t(), out=y[first:end])
            else:
                torch.addmm(bias[expert], aligned(x[first:end]), weight[expert].t(), out=y[first:end])
        y[parts[-1][1] :] = 0
        return y

    @staticmethod
    def backward(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
        dx, dweight = results.like(x), results.like(weight)
        parts = ranges(offsets, len(x))
        for expert, (first, end) in enumerate(parts):
            if first == end:
                dweight[expert] = 0
                continue
            rows = aligned(dy[first:end])
            torch.mm(rows, weight[expert], out=dx[first:end])
            torch.mm(_transposed(rows), aligned(x[first:end]), out=dweight[expert])
        dx[parts[-1][1] :] = 0
        return [dx, dweight]

    @staticmethod
    def plain_backward(
        x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, bias: torch.Tensor | None, dy: torch.Tensor
    ) -> list[torch.Tensor]:
        """`backward`, which can be differentiated."""
        parts = ranges(offsets, len(x))
        products = [dy[first:end] @ weight[expert] for expert, (first, end) in enumerate(parts)]
        dx = torch.cat([*products, torch.zeros_like(x[parts[-1][1] :])])
        dweight = torch.stack([dy[first:end].t() @ x[first:end] for first, end in parts])
        return [dx, dweight, *([] if bias is None else [sums(dy, offsets)])]


def _transposed(x: torch.Tensor) -> torch.Tensor:
    """The left factor; on a CPU, products of 16 bits with one that is not contiguous took a fifth longer."""
    return x.t().contiguous() if x.device.type == "cpu" and x.element_size() == 2 else x.t()


def add(y: torch.Tensor, bias: torch.Tensor, offsets: torch.Tensor) -> None:
    """Add each expert's bias to its rows, in place."""
    for expert, (first, end) in enumerate(ranges(offsets, len(y))):
        y[first:end] += bias[expert]


def sums(dy: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """The sum of each expert's rows, ``[E, outer]``."""
    return torch.stack([dy[first:end].sum(0) for first, end in ranges(offsets, len(dy))])


def ranges(offsets: torch.Tensor, count: int) -> list[tuple[int, int]]:
    """The first row of each expert and the one behind its last."""
    ends = offsets.tolist()
    starts = [0, *ends[:-1]]
    if any(first > end for first, end in zip(starts, ends)) or ends[-1] > count:
        raise ValueError(f"offsets are {ends}: they must not fall, and lie in 0 to the {count} rows of x")
    return list(zip(starts, ends))


class cpu(
    native.Compiled,
    grouped_matmul=f"pl{_MATRICES}{_SIZES}pppi",
    grouped_matmul_backward=f"ppl{_MATRICES}{_SIZES}pppi",
    grouped_matmul_room="p",
):
    """Of bf16 by grouped_matmul.cpp where there are AMX tiles, else as in plain torch."""

    @classmethod
    def load(cls, device: torch.device) -> str:
        described = native.description("grouped_matmul")
        if _has_tiles():
            return f"{described} for bf16, torch's products for other dtypes"
        return f"torch's products (bf16 has a kernel for AMX tiles: {described})"

    @staticmethod
    def forward(
        x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        if not _tiled(x):
            return reference.forward(x, weight, offsets, bias)
        ranges(offsets, len(x))
        y = results.empty(x, (len(x), weight.shape[1]))
        bias = None if bias is None else bias.contiguous()
        factors = (*lines.strided(x), *_matrices(weight), *_sizes(weight, offsets, x))
        cpu.library().grouped_matmul(*factors, bias, y, *_scratch())
        return y

    @staticmethod
    def backward(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
        if not _tiled(x):
            return reference.backward(x, weight, offsets, dy)
        ranges(offsets, len(x))
        gradients = [results.like(x), results.like(weight)]
        factors = (dy.contiguous(), *lines.strided(x), *_matrices(weight))
        cpu.library().grouped_matmul_backward(*factors, *_sizes(weight, offsets, x), *gradients, *_scratch())
        return gradients


def _has_tiles() -> bool:
    return native.instruction_set("grouped_matmul") == "amx"


def _tiled(x: torch.Tensor) -> bool:
    return x.dtype == torch.bfloat16 and _has_tiles()


def _matrices(weight: torch.Tensor) -> tuple[torch.Tensor, int, int, int]:
    """The matrices, the distances of two of them and of a matrix's lines, and whether rows lie side by side, or columns.

    A transposed weight is not copied: models have either.
    """
    along = weight.stride(2) == 1
    if not along and weight.stride(1) != 1:
        weight, along = weight.contiguous(), True
    return weight, weight.stride(0), weight.stride(1 if along else 2), int(along)


def _sizes(weight: torch.Tensor, offsets: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, int, int, int, int]:
    experts, outer, inner = weight.shape
    return offsets.contiguous(), experts, len(x), inner, outer


def _scratch() -> tuple[torch.Tensor, int]:
    """Memory for each thread, and the number of threads."""
    room = torch.empty(1, dtype=torch.int64)
    cpu.library().grouped_matmul_room(room)
    return torch.empty(abs(threads()), int(room), dtype=torch.int32), threads()


class cuda:
    """All experts' products in one call of torch's ``F.grouped_mm`` where that takes them, else as in plain torch."""

    @classmethod
    def load(cls, device: torch.device) -> str:
        if not hasattr(F, "grouped_mm"):
            return "torch's products (this torch has no F.grouped_mm)"
        return "F.grouped_mm for bf16 with rows of multiples of 16 bytes, torch's products else"

    @staticmethod
    def forward(
        x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        if not cuda.grouped(x, weight):
            return reference.forward(x, weight, offsets, bias)
        last, ends = _ends(offsets, len(x))
        y = F.grouped_mm(x.contiguous(), weight.contiguous().transpose(1, 2), offs=ends)
        if bias is not None:
            y[:last] += bias.repeat_interleave(offsets.diff(prepend=offsets.new_zeros(1)), 0, output_size=last)
        y[last:] = 0
        return y

    @staticmethod
    def backward(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
        if not cuda.grouped(x, weight):
            return reference.backward(x, weight, offsets, dy)
        last, ends = _ends(offsets, len(x))
        dx = F.grouped_mm(dy, weight.contiguous(), offs=ends)
        dx[last:] = 0
        return [dx, F.grouped_mm(dy.t(), x.contiguous(), offs=ends)]

    @staticmethod
    def grouped(x: torch.Tensor, weight: torch.Tensor) -> bool:
        """Whether torch multiplies all groups in one call."""
        widths = [size * x.element_size() for size in weight.shape[1:]]
        even = len(x) > 0 and not any(width % _BYTES for width in widths)
        recent = x.device.type != "cuda" or torch.cuda.get_device_capability(x.device) >= _OLDEST
        return hasattr(F, "grouped_mm") and x.dtype == torch.bfloat16 and even and recent


def _ends(offsets: torch.Tensor, count: int) -> tuple[int, torch.Tensor]:
    """The last end, and all in the dtype that torch takes."""
    return ranges(offsets, count)[-1][1], offsets.int()
