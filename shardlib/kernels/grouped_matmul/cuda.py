"""Products by expert on a GPU: all experts' in one call of torch's ``F.grouped_mm`` where that takes them, else as in plain
torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from shardlib.kernels.grouped_matmul import reference

_BYTES = 16  # of which rows must be multiples
_OLDEST = (8, 0)  # compute capability that torch's call supports


def load(device: torch.device) -> str:
    if not hasattr(F, "grouped_mm"):
        return "torch's products (this torch has no F.grouped_mm)"
    return "F.grouped_mm for bf16 with rows of multiples of 16 bytes, torch's products else"


def forward(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if not grouped(x, weight):
        return reference.forward(x, weight, offsets, bias)
    last, ends = _ends(offsets, len(x))
    y = F.grouped_mm(x.contiguous(), weight.contiguous().transpose(1, 2), offs=ends)
    if bias is not None:
        y[:last] += bias.repeat_interleave(offsets.diff(prepend=offsets.new_zeros(1)), 0, output_size=last)
    y[last:] = 0
    return y


def backward(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    if not grouped(x, weight):
        return reference.backward(x, weight, offsets, dy)
    last, ends = _ends(offsets, len(x))
    dx = F.grouped_mm(dy, weight.contiguous(), offs=ends)
    dx[last:] = 0
    return [dx, F.grouped_mm(dy.t(), x.contiguous(), offs=ends)]


def grouped(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether torch multiplies all groups in one call."""
    widths = [size * x.element_size() for size in weight.shape[1:]]
    even = len(x) > 0 and not any(width % _BYTES for width in widths)
    recent = x.device.type != "cuda" or torch.cuda.get_device_capability(x.device) >= _OLDEST
    return hasattr(F, "grouped_mm") and x.dtype == torch.bfloat16 and even and recent


def _ends(offsets: torch.Tensor, count: int) -> tuple[int, torch.Tensor]:
    """The last end, and all in the dtype that torch takes."""
    return reference.ranges(offsets, count)[-1][1], offsets.int()
