"""LayerNorm and RMSNorm on the CPU, by norm.cpp."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from shardlib.common.thresholds import threads
from shardlib.kernels.common import native, rows
from shardlib.kernels.norm.arguments import Norm

_SIGNATURES = {"norm": "ppippfillppi", "norm_backward": "pipfillpppppi"}


def load(device: torch.device) -> str:
    return f"{native.description('norm')}; LayerNorm without a sum, forward: torch"


def forward(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    weight, bias, eps, centred = norm
    if centred and weight.dtype == x.dtype:  # torch's is as fast as memory
        return F.layer_norm(x.contiguous(), weight.shape, weight, None if bias is None else bias.to(x.dtype), eps)
    return _forward(x, None, norm)[0]


def forward_of_sum(x: torch.Tensor, residual: torch.Tensor, norm: Norm) -> list[torch.Tensor]:
    if x.dtype == torch.float16:  # the kernel would read it as fp32 and not round the sum to fp16
        total = (x + residual).contiguous()
        return [*_forward(total, None, norm), total]
    return _forward(x, residual, norm)


def backward(total: torch.Tensor, norm: Norm, dy: torch.Tensor, dtotal: torch.Tensor | None) -> list[torch.Tensor]:
    weight, bias, eps, centred = norm
    total, dy = native.readable(total), native.readable(dy)
    dtotal = None if dtotal is None else native.readable(dtotal)
    ds, sums = rows.like(total), torch.empty(2 * len(weight))
    where = (*rows.sizes(total), dy, dtotal, ds, rows.partial_sums(len(sums)), sums, threads())
    _library().norm_backward(total, native.DTYPES[total.dtype], native.floats(weight), eps, centred, *where)
    dweight, dbias = sums.view(2, -1).unbind()
    return [ds, dweight.clone()] if bias is None else [ds, dweight.clone(), dbias.clone()]


def _forward(x: torch.Tensor, residual: torch.Tensor | None, norm: Norm) -> list[torch.Tensor]:
    weight, bias, eps, centred = norm
    x = native.readable(x)
    outputs = [rows.like(x)]
    total = None
    if residual is not None:
        residual, total = native.readable(residual), rows.like(x)
        outputs.append(total)
    vectors = (native.floats(weight), native.floats(bias))
    where = (*rows.sizes(x), outputs[0], total, threads())
    _library().norm(x, residual, native.DTYPES[x.dtype], *vectors, eps, centred, *where)
    return outputs


def _library() -> Any:
    return native.cpp_functions("norm", _SIGNATURES)
