"""Dropout by counter-based keys: the same mask on every mesh, drawn again in backward."""

from __future__ import annotations

from numbers import Real
from typing import Any

import torch

from shardlib.kernels.common.arguments import check_tensors
from shardlib.kernels.dropout import Draw
from shardlib.kernels.dropout import dropout as dropout_kernel
from shardlib.nn.sequence import current_parts
from shardlib.rng import Key, require_key


def dropout(
    x: torch.Tensor,
    p: float,
    key: Key,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    heads: tuple[int, int] | None = None,
) -> torch.Tensor:
    """Zero each element with probability ``p`` and scale the rest by ``1 / (1 - p)``.

    The mask depends on the key and the element's index in the global batch alone (dimension 0 of ``x`` is the
    batch, or a multiple of it), so it is equal on every mesh and under recompute; backward draws it again, and nothing
    is kept. Under a sequence plan, dimension 1 of an ``x`` that has one is this rank's part of the sequence.

    Args:
        bias: ``[x.shape[-1]]``, is added to ``x`` first.
        residual: like ``x``, is added to the result, all in one pass.
        heads: dimension 1 of ``x`` is heads: the first of them that is here, and how many there are on all ranks.

    Raises:
        ValueError: ``p`` outside [0, 1), or shapes that do not fit.
        TypeError: what are no floating-point tensors, or a key that is none.

    >>> x = sl.dropout(torch.ones(2, 1000), 0.25, sl.Key(0))
    >>> bool((x == 0).float().mean() < 0.3), float(x.max())
    (True, 1.3333333730697632)
    >>> torch.equal(x, sl.dropout(torch.ones(2, 1000), 0.25, sl.Key(0)))
    True
    """
    given = {"x": x, "bias": bias, "residual": residual}
    check_tensors("dropout", given, optional=("bias", "residual"))
    if not _is_probability(p):
        raise ValueError(f"dropout probability {p!r} is outside [0, 1)")
    if p == 0.0:
        x = x if bias is None else x + bias
        return x if residual is None else x + residual
    draw = _draw(x, p, require_key("dropout", "key", key), heads)
    if x.dim() < 2 + (draw.starts is not None):
        # Each element is a row of its own: positions of a part do not follow one another.
        x, residual = x if bias is None else x + bias, None if residual is None else residual[..., None]
        return dropout_kernel(x[..., None], draw, residual=residual)[..., 0]
    return dropout_kernel(x, draw, bias=bias, residual=residual)


def _is_probability(p: Any) -> bool:
    return isinstance(p, Real | torch.Tensor) and 0.0 <= float(p) < 1.0


def _draw(x: torch.Tensor, p: float, key: Key, heads: tuple[int, int] | None) -> Draw:
    """The index of each element of ``x`` is that in the whole tensor of all batches and heads and, under a sequence plan,
    all positions."""
    parts = current_parts.get()
    if heads is not None and heads[1] != x.shape[1]:
        places, length = torch.arange(heads[0], heads[0] + x.shape[1], device=x.device), heads[1]
    elif heads is None and parts is not None and x.dim() > 1:
        places, length = parts.positions(x)
    else:
        return Draw(p, *key.stretch(x.numel()))
    batch, rest = x.shape[0], x.shape[2:].numel()
    seed, first = key.stretch(batch)
    starts = (torch.arange(first, first + batch, device=x.device)[:, None] * length + places) * rest
    return Draw(
        p, seed, 0, starts[..., None] + torch.arange(0, rest, max(1, x.shape[2:][-1:].numel()), device=x.device)
    )
