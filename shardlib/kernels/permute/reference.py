"""Permutation of rows in plain torch; assignments without a row have one behind the last."""

from __future__ import annotations

import torch

from shardlib.kernels.common import rows as lines


def load(device: torch.device) -> str:
    return "reference"


def permute(x: torch.Tensor, positions: torch.Tensor, count: int) -> torch.Tensor:
    return _spread(x[:, None].expand(-1, positions.shape[1], -1), positions, count)


def unpermute(rows: torch.Tensor, positions: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    inside, found = _found(rows, positions)
    terms = found if weights is None else torch.where(inside, weights.to(found.dtype), 0)[..., None] * found
    total = terms.new_zeros(len(positions), rows.shape[1])
    for j in range(positions.shape[1]):  # in this order, whatever torch's sum does
        total = total + terms[:, j]
    return total.to(rows.dtype)


def backward(
    rows: torch.Tensor, positions: torch.Tensor, weights: torch.Tensor, dy: torch.Tensor
) -> list[torch.Tensor]:
    inside, found = _found(rows, positions)
    dy = lines.wide(dy)[:, None]
    drows = _spread((weights.to(dy.dtype)[..., None] * dy).to(rows.dtype), positions, len(rows))
    dweights = torch.where(inside, (found * dy).sum(-1), 0)
    return [drows, dweights.to(weights.dtype)]


def _inside(positions: torch.Tensor, count: int) -> torch.Tensor:
    return (positions >= 0) & (positions < count)


def _spread(terms: torch.Tensor, positions: torch.Tensor, count: int) -> torch.Tensor:
    """``terms [T, k, columns]`` as rows."""
    at = positions.where(_inside(positions, count), count).flatten()
    return terms.new_zeros(count + 1, terms.shape[-1]).index_add(0, at, terms.flatten(0, 1))[:count].clone()


def _found(rows: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A mask of the assignments that have a row, and ``[T, k, columns]``: those rows, others 0."""
    wide, inside = lines.wide(rows), _inside(positions, len(rows))
    padded = torch.cat([wide, wide.new_zeros(1, rows.shape[1])])
    return inside, padded[positions.where(inside, len(rows))]
