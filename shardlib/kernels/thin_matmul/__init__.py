"""y = x Wᵀ + b of few rows x, where reading W takes longest: W is plain, or quantised to 8 or 4 bits.

W stays in its bits in memory, is read once for up to 32 rows of x, and becomes floats in registers or in the cache. x is
``[..., inputs]`` and y ``[..., outputs]``, in fp32 or bf16 (fp16 and float64 by plain torch, which makes a quantised W
whole), computed in fp32. Bytes moved: those of W, which for a quantised one are bits / 8 + 4 / block for each element.
Operations: 2·rows·inputs·outputs. More rows are a product of torch's, for which a quantised W is made whole. Compiled, an
output has the same bits among any other rows, up to 32. Nothing has gradients.

Of experts, each has a quantised W for a range of rows, as in `grouped_matmul`.

On a CPU with AMX tiles, a W of bf16 is read straight into tiles. Elsewhere, and in fp32, W meets rows of x in vectors.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, NoReturn

import torch
import torch.nn.functional as F
from torch.overrides import has_torch_function

from shardlib.common._compat import differentiated
from shardlib.common.thresholds import Threshold, threads
from shardlib.kernels.common import native, results
from shardlib.kernels.common.arguments import FLOATS, check_tensors
from shardlib.kernels.common.dispatch import Plain, serving
from shardlib.kernels.grouped_matmul import add, grouped_matmul, ranges
from shardlib.kernels.quantize import Blockwise, dequantize, quantize

__all__ = ["Linear", "QuantizedMatrix", "thin_matmul"]

IMPLEMENTATIONS: dict[str, tuple[str, ...]] = {"cpu": ("cpu",)}
FEW = Threshold(32)  # rows that meet a weight; for more, one that is quantised is worth making whole


@dataclass(frozen=True, eq=False)
class Matrix:
    """A weight ``[outputs, inputs]``, or those of several experts ``[experts, outputs, inputs]``, quantised in blocks that do
    not cross rows.

    Attributes:
        values: ``[form.bytes(n)]``, of ``form.dtype``, n the elements of ``shape``.
        scales: fp32 ``[n / form.block]``.
        form: bits and block; the block divides the inputs.
        shape: of the weight.
        dtype: of the weight that was quantised, and of products with it.
    """

    values: torch.Tensor
    scales: torch.Tensor
    form: Blockwise
    shape: torch.Size
    dtype: torch.dtype

    def __getitem__(self, expert: int) -> Matrix:
        """The weight of one of several experts, ``[outputs, inputs]``. Shares the memory."""
        values, scales = (part[expert] for part in self.by_expert)
        return Matrix(values, scales, self.form, self.shape[1:], self.dtype)

    @property
    def by_expert(self) -> tuple[torch.Tensor, torch.Tensor]:
        """``values`` and ``scales`` as ``[experts, …]``."""
        return self.values.view(len(self), -1), self.scales.view(len(self), -1)

    def __len__(self) -> int:
        return self.shape[0]


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
            f"{tuple(offsets.shape)}: they must be [rows, inputs], [experts, outputs, inputs] and [experts], of one dtype"
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


class Linear(NamedTuple):
    """A weight ``[outputs, inputs]`` and a bias ``[outputs]``; called, it is `thin_matmul` with them.

    A weight that computes for itself, such as a slice, does so.
    """

    weight: torch.Tensor | Matrix
    bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if has_torch_function(self):
            return F.linear(x, self.weight, self.bias)  # type: ignore[arg-type]
        return thin_matmul(x, self.weight, self.bias)


@dataclass(frozen=True, eq=False)
class QuantizedMatrix(Matrix):
    """A layer's weight, quantised blockwise: ``F.linear`` takes it in place of the weight, and nothing else does.

    Of the weights of experts, which have a further dimension before the others, it is `grouped_matmul` that takes them.
    """

    requires_grad = False

    @classmethod
    def of(cls, weight: torch.Tensor, bits: int = 8, block: int = 128) -> QuantizedMatrix:
        """``weight`` in blocks of at most ``block`` elements: the most that divide the inputs.

        Args:
            weight: ``[outputs, inputs]``, or ``[experts, outputs, inputs]``.

        Raises:
            ValueError: another number of dimensions, or inputs that are no multiple of 16.

        >>> from shardlib.kernels.thin_matmul import QuantizedMatrix
        >>> matrix = QuantizedMatrix.of(torch.ones(8, 48), bits=4)
        >>> matrix.form.block, matrix.nbytes
        (16, 288)
        >>> torch.nn.functional.linear(torch.ones(48), matrix)
        tensor([48., 48., 48., 48., 48., 48., 48., 48.])
        """
        if weight.dim() not in (2, 3) or weight.shape[-1] % 16:
            raise ValueError(
                f"a weight {tuple(weight.shape)} is not quantised: take a matrix whose inputs are a multiple of 16"
            )
        inputs = weight.shape[-1]
        form = Blockwise(bits, min(block, inputs & -inputs))
        values, scales = quantize(weight.detach().float().flatten(), form)
        return cls(values, scales, form, weight.shape, weight.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of values and scales."""
        return self.values.nbytes + self.scales.nbytes

    def dense(self) -> torch.Tensor:
        """The weight that the values stand for, of the same shape."""
        return whole(self)

    @property
    def device(self) -> torch.device:
        return self.values.device

    def to(self, device: torch.device) -> QuantizedMatrix:
        """The same on ``device``."""
        return replace(self, values=self.values.to(device), scales=self.scales.to(device))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            return thin_matmul(*args, **(kwargs or {}))
        if func is grouped_matmul:
            return grouped_thin_matmul(*args, **(kwargs or {}))
        raise TypeError(
            f"{getattr(func, '__name__', func)} of a QuantizedMatrix: F.linear alone takes it, and product() of experts; "
            "weight.dense() is a tensor"
        )


def line(weight: torch.Tensor | Matrix | None, bias: torch.Tensor | None = None) -> tuple[int, ...]:
    """The line of numbers by which compiled kernels take a weight: `Matrix` in common/thin.h; zeros for none.

    A weight is ``[outputs, inputs]``, several are ``[groups, outputs, inputs]``. The line has addresses, so whoever uses it
    also keeps ``weight`` and ``bias``; both are contiguous.
    """
    if weight is None:
        return (0,) * 7
    sizes = (*weight.shape[-2:], 0 if bias is None else bias.data_ptr())
    if isinstance(weight, Matrix):
        return weight.values.data_ptr(), weight.form.bits, weight.scales.data_ptr(), weight.form.block, *sizes
    return weight.data_ptr(), 8 * weight.element_size(), 0, 0, *sizes


def lines(*given: tuple[int, ...]) -> Any:
    """Lines, one after the other, in memory."""
    return (ctypes.c_int64 * sum(map(len, given)))(*[number for line in given for number in line])


def readable(tensors: Sequence[torch.Tensor | Matrix | None], dtype: torch.dtype) -> bool:
    """Whether compiled kernels can read all of these, of one dtype, at their addresses."""
    return dtype in (torch.float32, torch.bfloat16) and all(
        tensor.values.device.type == "cpu"
        if isinstance(tensor, Matrix)
        else (not has_torch_function((tensor,)) and tensor.device.type == "cpu" and tensor.is_contiguous())
        for tensor in tensors
        if tensor is not None
    )


class DecoderWeights(ABC):
    """The base of the weights of one half of a decoder's layer, all of one dtype: a norm, `linears` and ``others``.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """

    norm: torch.Tensor

    @property
    @abstractmethod
    def linears(self) -> tuple[Linear | None, ...]:
        """In the order in which compiled kernels take them."""

    @property
    def others(self) -> tuple[torch.Tensor | None, ...]:
        return ()

    @abstractmethod
    def shapes(self) -> Sequence[tuple[Any, tuple[int, ...]]] | None:
        """Each weight, which may be None, with the shape that it must have; None where sizes do not fit each other."""

    def __post_init__(self) -> None:
        if self._computes_itself:
            return
        expected = self.shapes()
        given = [(part, shape) for part, shape in expected or () if part is not None]
        if expected is None or any(part.shape != shape or part.dtype != self.norm.dtype for part, shape in given):
            name, parts = type(self).__name__, [part for part in self._parts if part is not None]
            weights = ", ".join(f"{tuple(part.shape)} of {part.dtype}" for part in parts)
            raise ValueError(f"{name} of {weights}: they do not fit each other. help({name}) has the shapes")

    @cached_property
    def lines(self) -> Any:
        """What C++ calls a layer; None where it cannot read it."""
        if self._computes_itself or not readable(self._parts, self.norm.dtype):
            return None
        return lines(*[line(*(linear or (None,))) for linear in self.linears])

    @property
    def _parts(self) -> tuple[Any, ...]:
        return (self.norm, *self.others, *(part for linear in self.linears if linear for part in linear))

    @cached_property
    def _computes_itself(self) -> bool:
        return has_torch_function(tuple(part for part in self._parts if not isinstance(part, Matrix)))


class reference(Plain):
    """In plain torch, which makes a quantised matrix whole first; and of ranges of rows, by expert."""

    @staticmethod
    def product(x: torch.Tensor, weight: torch.Tensor | Matrix, bias: torch.Tensor | None) -> torch.Tensor:
        return F.linear(x, whole(weight) if isinstance(weight, Matrix) else weight, bias)

    @staticmethod
    def grouped(x: torch.Tensor, weight: Matrix, ends: torch.Tensor) -> torch.Tensor:
        y = results.empty(x, (len(x), weight.shape[1]))
        parts = ranges(ends, len(x))
        for expert, (first, end) in enumerate(parts):
            if first < end:
                y[first:end] = reference.product(x[first:end], weight[expert], None)
        y[parts[-1][1] :] = 0
        return y


def whole(weight: Matrix) -> torch.Tensor:
    """The weight that the values stand for."""
    flat = dequantize(weight.values, weight.scales, weight.form, weight.shape.numel())
    return flat.view(weight.shape).to(weight.dtype)


class cpu(native.Compiled, thin_matmul="pilplppi"):
    """By thin_matmul.cpp."""

    @staticmethod
    def product(x: torch.Tensor, weight: torch.Tensor | Matrix, bias: torch.Tensor | None) -> torch.Tensor:
        outputs, inputs = weight.shape
        rows = x.reshape(-1, inputs)
        if not _serves(rows) or (isinstance(weight, torch.Tensor) and not weight.is_contiguous()):
            return reference.product(x, weight, bias)
        y = x.new_empty(len(rows), outputs)
        _run(rows, None, line(weight, None if bias is None else bias.contiguous()), y)
        return y.view(*x.shape[:-1], outputs)

    @staticmethod
    def grouped(x: torch.Tensor, weight: Matrix, ends: torch.Tensor) -> torch.Tensor:
        y = results.empty(x, (len(x), weight.shape[1]))
        parts = ranges(ends, len(x))
        if all(_serves(x[first:end]) for first, end in parts):
            _run(x, ends.contiguous(), line(weight), y)
        else:
            for expert, (first, end) in enumerate(parts):
                y[first:end] = cpu.product(x[first:end], weight[expert], None)
        y[parts[-1][1] :] = 0
        return y


def _serves(rows: torch.Tensor) -> bool:
    return len(rows) <= FEW() and rows.dtype != torch.float16


def _run(x: torch.Tensor, ends: torch.Tensor | None, weight: tuple[int, ...], y: torch.Tensor) -> None:
    """Fills ``y`` ``[R, outputs]``: group g's rows of ``x`` ``[R, inputs]``, before ``ends[g]``, times its weight.

    Args:
        ends: int64 ``[groups]``; None for one group.
    """
    x, groups = x.contiguous(), 1 if ends is None else len(ends)
    cpu.library().thin_matmul(x, native.DTYPES[x.dtype], len(x), ends, groups, lines(weight), y, threads())
