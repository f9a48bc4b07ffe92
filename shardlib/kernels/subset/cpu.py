"""Tokens by their positions on the CPU, by subset.cpp."""

from __future__ import annotations

from typing import Any

import torch

from shardlib.common.thresholds import threads
from shardlib.kernels.common import native, results
from shardlib.kernels.subset.reference import slots

_SIGNATURES = {"take": "ppllllpi", "put": "pppllllpi"}


def load(device: torch.device) -> str:
    return native.description("subset")


def take(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    x, out = x.contiguous(), results.empty(x, (*index.shape, x.shape[2]))
    sizes = (len(out), index.shape[1], x.shape[1], _bytes(x))
    _library().take(x, index.contiguous(), *sizes, out, threads())
    return out


def put(x: torch.Tensor | None, index: torch.Tensor, rows: torch.Tensor | None, length: int) -> torch.Tensor:
    given = rows if x is None else x
    assert given is not None
    x, rows = (None if each is None else each.contiguous() for each in (x, rows))
    out = results.empty(given, (len(index), length, given.shape[2]))
    sizes = (len(out), index.shape[1], length, _bytes(given))
    _library().put(x, rows, slots(index, length), *sizes, out, threads())
    return out


def _bytes(x: torch.Tensor) -> int:
    """Bytes of one token."""
    return x.shape[2] * x.element_size()


def _library() -> Any:
    return native.cpp_functions("subset", _SIGNATURES)
