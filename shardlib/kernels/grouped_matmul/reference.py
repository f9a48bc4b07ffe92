"""Products by expert in plain torch: one product an expert, written in place, and the same as new tensors.

An expert's rows are read from where an allocation begins, so that its product does not depend on the experts before it.
"""

from __future__ import annotations

import torch

from shardlib.common.alignment import aligned
from shardlib.kernels.common import results


def load(device: torch.device) -> str:
    return "reference"


def forward(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
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


def add(y: torch.Tensor, bias: torch.Tensor, offsets: torch.Tensor) -> None:
    """Add each expert's bias to its rows, in place."""
    for expert, (first, end) in enumerate(ranges(offsets, len(y))):
        y[first:end] += bias[expert]


def sums(dy: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """The sum of each expert's rows, ``[E, outer]``."""
    return torch.stack([dy[first:end].sum(0) for first, end in ranges(offsets, len(dy))])


def plain_backward(
    x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, bias: torch.Tensor | None, dy: torch.Tensor
) -> list[torch.Tensor]:
    """`backward`, which can be differentiated."""
    parts = ranges(offsets, len(x))
    products = [dy[first:end] @ weight[expert] for expert, (first, end) in enumerate(parts)]
    dx = torch.cat([*products, torch.zeros_like(x[parts[-1][1] :])])
    dweight = torch.stack([dy[first:end].t() @ x[first:end] for first, end in parts])
    return [dx, dweight, *([] if bias is None else [sums(dy, offsets)])]


def ranges(offsets: torch.Tensor, count: int) -> list[tuple[int, int]]:
    """The first row of each expert and the one behind its last."""
    ends = offsets.tolist()
    starts = [0, *ends[:-1]]
    if any(first > end for first, end in zip(starts, ends)) or ends[-1] > count:
        raise ValueError(f"offsets are {ends}: they must not fall, and lie in 0 to the {count} rows of x")
    return list(zip(starts, ends))


def _transposed(x: torch.Tensor) -> torch.Tensor:
    """The left factor; on a CPU, products of 16 bits with one that is not contiguous took a fifth longer."""
    return x.t().contiguous() if x.device.type == "cpu" and x.element_size() == 2 else x.t()
