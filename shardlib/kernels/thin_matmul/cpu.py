"""Products of few rows on the CPU, by thin_matmul.cpp."""

from __future__ import annotations

from typing import Any

import torch

from shardlib.common.thresholds import Threshold, threads
from shardlib.kernels.common import native, results
from shardlib.kernels.grouped_matmul.reference import ranges
from shardlib.kernels.thin_matmul import reference
from shardlib.kernels.thin_matmul.arguments import Matrix
from shardlib.kernels.thin_matmul.line import line, lines

_SIGNATURES = {"thin_matmul": "pilplppi"}
FEW = Threshold(32)  # rows that meet a weight; for more, one that is quantised is worth making whole


def load(device: torch.device) -> str:
    return native.description("thin_matmul")


def product(x: torch.Tensor, weight: torch.Tensor | Matrix, bias: torch.Tensor | None) -> torch.Tensor:
    outputs, inputs = weight.shape
    rows = x.reshape(-1, inputs)
    if not _serves(rows) or (isinstance(weight, torch.Tensor) and not weight.is_contiguous()):
        return reference.product(x, weight, bias)
    y = x.new_empty(len(rows), outputs)
    _run(rows, None, line(weight, None if bias is None else bias.contiguous()), y)
    return y.view(*x.shape[:-1], outputs)


def grouped(x: torch.Tensor, weight: Matrix, ends: torch.Tensor) -> torch.Tensor:
    y = results.empty(x, (len(x), weight.shape[1]))
    parts = ranges(ends, len(x))
    if all(_serves(x[first:end]) for first, end in parts):
        _run(x, ends.contiguous(), line(weight), y)
    else:
        for expert, (first, end) in enumerate(parts):
            y[first:end] = product(x[first:end], weight[expert], None)
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
    _library().thin_matmul(x, native.DTYPES[x.dtype], len(x), ends, groups, lines(weight), y, threads())


def _library() -> Any:
    return native.cpp_functions("thin_matmul", _SIGNATURES)
