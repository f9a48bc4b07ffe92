"""Blockwise symmetric quantisation to 8 or 4 bits (ZeRO++, arXiv 2306.10209), on flat buffers.

Over a block, with L = 127 or 7:

- quantise: c = x + e (or x);  s = max|c| / L;  q = clamp(round(c / s), −L, L), ties to even;  e ← c − q·s.
- dequantise: Σ_r q_r·s_r over n ranks' values, in rank order, each product rounded before it is added.
- both in one, for an all-to-all in two hops: c = Σ_r q_r·s_r + e is quantised without storing the sum.

Here e is the residual. A block of zeros has the scale 0 and values 0, as has a block whose scale underflows. With denormal
scales c / s can exceed L, hence the clamp. All arithmetic is in fp32 and every implementation gives the same bits. With an
odd number of elements the upper half of the last byte of 4-bit values is zero.

Bytes moved per element, fp32 in: 4 + bits/8 to quantise (12 + bits/8 with a residual), the same to dequantise one rank;
scales add 4/block. Operations: two passes over a block that stays in the cache, one division per element.

NaN or infinity in a block makes its scale NaN or infinity and its values 0, and leaves its residual unchanged, so check the
scales before using other results.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from shardlib.kernels.common import native
from shardlib.kernels.common.arguments import check_buffers
from shardlib.kernels.common.dispatch import Plain, on, serving
from shardlib.kernels.common.flat import FLOATS

__all__ = ["Blockwise", "dequantize", "dequantize_sum", "dequantize_sum_quantize", "quantize"]

# Triton's were the faster ones on an H100.
IMPLEMENTATIONS: dict[str, tuple[str, ...]] = {
    "cpu": ("cpu",),
    "cuda": ("triton", "cuda"),
}
_FILLED = ("residual", "out", "out_values", "out_scales")


@dataclass(frozen=True)
class Blockwise:
    """Symmetric integers with one fp32 scale per block of consecutive elements.

    Attributes:
        bits: 8, one int8 per element; or 4, two elements to a uint8, the first in the low half.
        block: elements per scale, a power of two from 16 to 4096; the last block may be shorter.
    """

    bits: int
    block: int = 128

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise ValueError(f"bits={self.bits}: values have 4 or 8 bits")
        if not 16 <= self.block <= 4096 or self.block & (self.block - 1):
            raise ValueError(f"blocks of {self.block} elements: take a power of two from 16 to 4096")

    @property
    def largest(self) -> int:
        """Magnitude of the largest value: 127 or 7."""
        return 2 ** (self.bits - 1) - 1

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the stored values."""
        return torch.int8 if self.bits == 8 else torch.uint8

    def bytes(self, elements: int) -> int:
        """The bytes that the values of ``elements`` take."""
        return -(-elements * self.bits // 8)

    def scales(self, elements: int) -> int:
        """The number of scales of ``elements``."""
        return -(-elements // self.block)


class Quantized(NamedTuple):
    """Values and their scales, of one rank, or of several ranks with a first dimension of ranks."""

    values: torch.Tensor
    scales: torch.Tensor
    form: Blockwise


def quantize(
    x: torch.Tensor,
    form: Blockwise,
    residual: torch.Tensor | None = None,
    *,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    using: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantises ``x``; updates ``residual``, if given, in place.

    Args:
        x: ``[d]``, fp32, bf16 or fp16.
        residual: fp32 ``[d]``, contiguous: the sum of what earlier calls rounded off.
        out: the values and scales to fill, if given; allocating memory can take as long as quantising.

    Returns:
        values of ``form.dtype`` ``[form.bytes(d)]``, and scales fp32 ``[form.scales(d)]``.
    """
    out = _outputs(form, len(x), x.device) if out is None else out
    check_buffers(_FILLED, x=(x, (len(x),), FLOATS), **_expected(len(x), residual, form, out))
    with on(x.device):
        serving("quantize", x, using).quantize(x, residual, Quantized(*out, form))
    return out


def dequantize(
    values: torch.Tensor,
    scales: torch.Tensor,
    form: Blockwise,
    elements: int,
    *,
    dtype: torch.dtype = torch.float32,
    out: torch.Tensor | None = None,
    using: str | None = None,
) -> torch.Tensor:
    """The numbers that `quantize` coded, ``[elements]`` of ``dtype`` (or in ``out``)."""
    return dequantize_sum(values.unsqueeze(0), scales.unsqueeze(0), form, elements, dtype=dtype, out=out, using=using)


def dequantize_sum(
    values: torch.Tensor,
    scales: torch.Tensor,
    form: Blockwise,
    elements: int,
    *,
    dtype: torch.dtype = torch.float32,
    out: torch.Tensor | None = None,
    using: str | None = None,
) -> torch.Tensor:
    """The sum of n ranks' values, ``[elements]`` of ``dtype``, added in fp32.

    Args:
        values: ``[n, form.bytes(elements)]``.
        scales: fp32 ``[n, form.scales(elements)]``.
        out: fp32, bf16 or fp16 ``[elements]``: receives the sum, if given; allocating memory takes longer than the sum.
    """
    if out is None:
        out = torch.empty(elements, dtype=dtype, device=values.device)
    check_buffers(_FILLED, **_sent(values, scales, form, elements), out=(out, (elements,), FLOATS))
    with on(values.device):
        sent = Quantized(values.contiguous(), scales.contiguous(), form)
        serving("quantize", values, using).dequantize_sum(sent, out)
    return out


def dequantize_sum_quantize(
    values: torch.Tensor,
    scales: torch.Tensor,
    form: Blockwise,
    elements: int,
    out_form: Blockwise,
    residual: torch.Tensor | None = None,
    *,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    using: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantize` of the ranks' `dequantize_sum`, in one pass; updates ``residual``, if given, in place.

    Args:
        values: ``[n, form.bytes(elements)]``.
        scales: fp32 ``[n, form.scales(elements)]``.
        out_form: of the result; its blocks must have the size of those of ``form``.
        residual: fp32 ``[elements]``, contiguous.
        out: the values and scales to fill, if given.

    Returns:
        values and scales in ``out_form``, as in `quantize`.
    """
    if out_form.block != form.block:
        raise ValueError(f"blocks of {form.block} and of {out_form.block}: quantise to the blocks that come in")
    out = _outputs(out_form, elements, values.device) if out is None else out
    expected = _sent(values, scales, form, elements) | _expected(elements, residual, out_form, out)
    check_buffers(_FILLED, **expected)
    with on(values.device):
        sent = Quantized(values.contiguous(), scales.contiguous(), form)
        filled = Quantized(*out, out_form)
        serving("quantize", values, using).dequantize_sum_quantize(sent, elements, residual, filled)
    return out


def _outputs(form: Blockwise, elements: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    values = torch.empty(form.bytes(elements), dtype=form.dtype, device=device)
    return values, torch.empty(form.scales(elements), device=device)


def _sent(values: torch.Tensor, scales: torch.Tensor, form: Blockwise, elements: int) -> dict[str, Any]:
    """What `check_buffers` is to expect of ranks' values and scales."""
    return {
        "values": (values, (len(values), form.bytes(elements)), (form.dtype,)),
        "scales": (scales, (len(values), form.scales(elements)), FLOATS[:1]),
    }


def _expected(
    elements: int, residual: torch.Tensor | None, form: Blockwise, out: tuple[torch.Tensor, torch.Tensor]
) -> dict[str, Any]:
    """What `check_buffers` is to expect of tensors that are filled."""
    return {
        "residual": (residual, (elements,), FLOATS[:1]),
        "out_values": (out[0], (form.bytes(elements),), (form.dtype,)),
        "out_scales": (out[1], (form.scales(elements),), FLOATS[:1]),
    }


class reference(Plain):
    """In plain torch: the oracle of the kernels, and the fallback."""

    @staticmethod
    def quantize(x: torch.Tensor, residual: torch.Tensor | None, out: Quantized) -> None:
        values, scales, form = out
        c = x.float() if residual is None else x.float() + residual
        blocks = torch.nn.functional.pad(c, (0, -len(c) % form.block)).view(-1, form.block)
        # Division by a tensor: CUDA would multiply by a Python number's reciprocal.
        torch.div(blocks.abs().amax(dim=1), blocks.new_full((1,), form.largest), out=scales)
        usable = scales.isfinite() & (scales > 0)
        steps = (blocks / scales.unsqueeze(1)).clamp(-form.largest, form.largest).round()
        steps = torch.where(usable.unsqueeze(1), steps, 0.0)
        if residual is not None:
            left = (blocks - steps * scales.unsqueeze(1)).flatten()[: len(c)]
            finite = scales.isfinite().repeat_interleave(form.block)[: len(c)]
            residual.copy_(torch.where(finite, left, residual))
        whole = steps.flatten()[: len(c)].to(torch.int8)
        values.copy_(_pack(whole) if form.bits == 4 else whole)

    @staticmethod
    def dequantize_sum(sent: Quantized, out: torch.Tensor) -> None:
        values, scales, form = sent
        total = scales.new_zeros(len(out))
        for row, per_block in zip(values, scales):
            steps = (_unpack(row) if form.bits == 4 else row)[: len(out)]
            total += steps.float() * per_block.repeat_interleave(form.block)[: len(out)]
        out.copy_(total)

    @staticmethod
    def dequantize_sum_quantize(sent: Quantized, elements: int, residual: torch.Tensor | None, out: Quantized) -> None:
        total = sent.scales.new_empty(elements)
        reference.dequantize_sum(sent, total)
        reference.quantize(total, residual, out)


def _pack(values: torch.Tensor) -> torch.Tensor:
    """int8 ``[d]`` from -8 to 7 -> uint8 ``[⌈d/2⌉]``."""
    nibbles = torch.nn.functional.pad(values, (0, len(values) % 2)).view(torch.uint8) & 15
    return nibbles[0::2] | nibbles[1::2] << 4


def _unpack(packed: torch.Tensor) -> torch.Tensor:
    """uint8 ``[b]`` -> int8 ``[2b]``."""
    nibbles = torch.stack([packed & 15, packed >> 4], dim=1).flatten().view(torch.int8)
    return nibbles - ((nibbles & 8) << 1)


class cpu(
    native.Compiled,
    quantize="pipillppi",
    dequantize_sum="pplillpii",
    dequantize_sum_quantize="pplipillppi",
):
    """By quantize.cpp."""

    @classmethod
    def quantize(cls, x: torch.Tensor, residual: torch.Tensor | None, out: Quantized) -> None:
        x = native.readable(x)
        values, scales, form = out
        where = (form.bits, form.block, len(x), values, scales, cls.runs_on(x.device))
        cls.library().quantize(x, native.DTYPES[x.dtype], residual, *where)

    @classmethod
    def dequantize_sum(cls, sent: Quantized, out: torch.Tensor) -> None:
        if out.dtype == torch.float16:
            total = torch.empty(len(out), device=out.device)
            cls.dequantize_sum(sent, total)
            out.copy_(total)
            return
        values, scales, form = sent
        where = (form.bits, form.block, len(out), out, native.DTYPES[out.dtype], cls.runs_on(out.device))
        cls.library().dequantize_sum(values, scales, len(values), *where)

    @classmethod
    def dequantize_sum_quantize(
        cls, sent: Quantized, elements: int, residual: torch.Tensor | None, out: Quantized
    ) -> None:
        values, scales, form = sent
        where = (out.form.bits, form.block, elements, out.values, out.scales, cls.runs_on(values.device))
        cls.library().dequantize_sum_quantize(values, scales, len(values), form.bits, residual, *where)


class cuda(cpu):
    """By quantize.cu."""
