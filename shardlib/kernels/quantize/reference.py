"""Blockwise quantisation in plain torch: the oracle of the kernels, and the fallback.

See `shardlib.kernels.quantize.op` for the mathematics.
"""

from __future__ import annotations

import torch

from shardlib.kernels.quantize.arguments import Quantized


def load(device: torch.device) -> str:
    return "reference"


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


def dequantize_sum(sent: Quantized, out: torch.Tensor) -> None:
    values, scales, form = sent
    total = scales.new_zeros(len(out))
    for row, per_block in zip(values, scales):
        steps = (_unpack(row) if form.bits == 4 else row)[: len(out)]
        total += steps.float() * per_block.repeat_interleave(form.block)[: len(out)]
    out.copy_(total)


def dequantize_sum_quantize(sent: Quantized, elements: int, residual: torch.Tensor | None, out: Quantized) -> None:
    total = sent.scales.new_empty(elements)
    dequantize_sum(sent, total)
    quantize(total, residual, out)


def _pack(values: torch.Tensor) -> torch.Tensor:
    """int8 ``[d]`` from -8 to 7 -> uint8 ``[⌈d/2⌉]``."""
    nibbles = torch.nn.functional.pad(values, (0, len(values) % 2)).view(torch.uint8) & 15
    return nibbles[0::2] | nibbles[1::2] << 4


def _unpack(packed: torch.Tensor) -> torch.Tensor:
    """uint8 ``[b]`` -> int8 ``[2b]``."""
    nibbles = torch.stack([packed & 15, packed >> 4], dim=1).flatten().view(torch.int8)
    return nibbles - ((nibbles & 8) << 1)
