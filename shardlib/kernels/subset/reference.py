"""Tokens by their positions in plain torch."""

from __future__ import annotations

import torch


def load(device: torch.device) -> str:
    return "reference"


def take(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return x.gather(1, _wide(index, x))


def put(x: torch.Tensor | None, index: torch.Tensor, rows: torch.Tensor | None, length: int) -> torch.Tensor:
    """``x``, or zeros, with ``rows``, or zeros, at the positions."""
    given = rows if x is None else x
    assert given is not None
    before = given.new_zeros(len(index), length, given.shape[2]) if x is None else x
    wide = _wide(index, given)
    return before.scatter(1, wide, before.new_zeros(wide.shape) if rows is None else rows)


def slots(index: torch.Tensor, length: int) -> torch.Tensor:
    """For every token its place in ``index``, −1 where it is not there: int64 ``[batch, tokens]``."""
    places = torch.arange(index.shape[1], device=index.device).expand_as(index)
    return index.new_full((len(index), length), -1).scatter_(1, index, places)


def _wide(index: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return index[..., None].expand(-1, -1, x.shape[2])
