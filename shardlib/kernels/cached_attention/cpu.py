"""Attention to a cache on the CPU, by cached_attention.cpp."""

from __future__ import annotations

from typing import Any

import torch

from shardlib.common.thresholds import threads
from shardlib.kernels.cached_attention import reference
from shardlib.kernels.cached_attention.arguments import Attention
from shardlib.kernels.common import native

_SIGNATURES = {"cached_attention": "pppppppillllllppi"}


def load(device: torch.device) -> str:
    return native.description("cached_attention")


def attend(how: Attention) -> torch.Tensor:
    if how.q.dtype == torch.float16:
        return reference.attend(how)
    q, k, v = (x.contiguous() for x in (how.q, how.k, how.v))
    (number, heads, size), (_, kv_heads, room, _) = q.shape, how.keys.shape
    scores, y = torch.empty(number * heads * room), torch.empty_like(q)
    sizes = (native.DTYPES[q.dtype], number, heads, kv_heads, room, size, how.window)
    _library().cached_attention(q, k, v, how.keys, how.values, how.rows, how.starts, *sizes, scores, y, threads())
    return y


def _library() -> Any:
    return native.cpp_functions("cached_attention", _SIGNATURES)
