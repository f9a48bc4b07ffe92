"""Dropout by counter-based keys, with the same mask on every mesh, which backward draws again."""

from __future__ import annotations

from numbers import Real
from typing import Any

import torch

from shardlib.common.environment import environment
from shardlib.kernels.common.arguments import check_tensors
from shardlib.kernels.dropout import DropoutDraw
from shardlib.kernels.dropout import dropout as dropout_kernel
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

    The mask depends only on the key and the element's index in the global batch (dimension 0 of ``x`` is the batch, or a
    multiple of it), so it is equal on every mesh and under recompute. Backward draws the mask again; nothing is kept. Under a
    sequence plan, dimension 1 of an ``x`` that has one is this rank's sequence part, unless ``heads`` is given.

    Args:
        x: floating-point, at least one dimension.
        p: in [0, 1).
        key: the key that the mask is drawn from.
        bias: ``[x.shape[-1]]``, added to ``x`` first.
        residual: like ``x``, added to the result in the same pass.
        heads: where dimension 1 of ``x`` is heads: the index of the first head that this rank holds, and the number of heads
            on all ranks together.

    Raises:
        ValueError: ``p`` outside [0, 1), or shapes that do not fit.
        TypeError: an argument that is not a floating-point tensor, or a key that is not a `Key`.

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
        # As a column, since the positions of a sequence part need not be consecutive.
        x, residual = x if bias is None else x + bias, None if residual is None else residual[..., None]
        return dropout_kernel(x[..., None], draw, residual=residual)[..., 0]
    return dropout_kernel(x, draw, bias=bias, residual=residual)


def _is_probability(p: Any) -> bool:
    return isinstance(p, Real | torch.Tensor) and 0.0 <= float(p) < 1.0


def _draw(x: torch.Tensor, p: float, key: Key, heads: tuple[int, int] | None) -> DropoutDraw:
    """The draw of ``x``'s mask: each element's index is its index in the tensor of all ranks' batches, heads and, under a
    sequence plan, positions."""
    parts = environment().parts
    if heads is not None and heads[1] != x.shape[1]:
        positions, length = torch.arange(heads[0], heads[0] + x.shape[1], device=x.device), heads[1]
    elif heads is None and parts is not None and x.dim() > 1:
        positions, length = parts.positions(x)
    else:
        return DropoutDraw(p, *key.stretch(x.numel()))
    batch, rest = x.shape[0], x.shape[2:].numel()
    seed, first = key.stretch(batch)
    starts = (torch.arange(first, first + batch, device=x.device)[:, None] * length + positions) * rest
    return DropoutDraw(
        p, seed, 0, starts[..., None] + torch.arange(0, rest, max(1, x.shape[2:][-1:].numel()), device=x.device)
    )
