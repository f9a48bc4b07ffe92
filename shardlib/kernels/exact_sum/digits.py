"""Exact sums of float64 numbers, as digits in base 2³² (a superaccumulator: R. Neal, arXiv 1505.05571).

Digit i counts multiples of 2^(32i − 1074), so the digits cover every float64. They need not lie between 0 and 2³²: digits of
several sums are added one by one, and carried only when the sum is rounded. A digit of one sum is below 2³³ and a float64
holds integers to 2⁵³, so 2²⁰ of them can be added without rounding, in any order. What is not finite is added apart.
"""

from __future__ import annotations

import math

import torch

PLACES = 67  # digits: 66 for the highest exponent, and one for carries
COUNT = PLACES + 1  # numbers that hold a sum: the digits, and the sum of the terms that are not finite
_LOW = (1 << 32) - 1
_MANTISSA = (1 << 52) - 1


def total(terms: torch.Tensor) -> torch.Tensor:
    """The digits of the sum of fewer than 2²⁹ terms, float64 ``[COUNT]``."""
    return along(terms.reshape(-1), 0)


def of_each(values: torch.Tensor) -> torch.Tensor:
    """The digits of each number: float64 ``[...]`` to ``[..., COUNT]``."""
    return along(values[..., None], -1)


def along(grid: torch.Tensor, dim: int) -> torch.Tensor:
    """The digits of the sums of a float64 ``grid`` over one dimension, ``[..., COUNT]`` with the other dimensions before."""
    grid = grid.movedim(dim, -1)
    kept, count = grid.shape[:-1], grid.shape[:-1].numel()
    rows = torch.arange(count, device=grid.device)[:, None].expand(count, grid.shape[-1])
    return _added(grid.reshape(-1), rows.reshape(-1), count).view(*kept, COUNT)


def of_integers(sums: torch.Tensor, strange: torch.Tensor) -> torch.Tensor:
    """Digits as float64 ``[..., COUNT]``, from int64 sums ``[..., PLACES]`` and what is not finite, ``[...]``."""
    out = torch.cat([sums & _LOW, strange[..., None]], dim=-1)
    out[..., 1:PLACES] += sums[..., :-1] >> 32
    return out


def rounded(sums: torch.Tensor) -> torch.Tensor:
    """The float64 nearest to each sum: ``[..., COUNT]`` to ``[...]``."""
    numbers = [_rounded(row) for row in sums.reshape(-1, COUNT).tolist()]
    return torch.tensor(numbers, dtype=torch.float64).reshape(sums.shape[:-1]).to(sums.device)


def _rounded(row: list[float]) -> float:
    *digits, strange = row
    if strange != 0.0:
        return strange
    whole = sum(int(digit) << (32 * place) for place, digit in enumerate(digits) if digit)
    try:
        return whole / (1 << 1074)  # the quotient of two integers is rounded once
    except OverflowError:
        return math.inf if whole > 0 else -math.inf


def _added(terms: torch.Tensor, rows: torch.Tensor, count: int) -> torch.Tensor:
    """The digits of ``count`` sums; each term belongs to the sum of its number in ``rows``."""
    bits = terms.view(torch.int64)
    exponent = (bits >> 52) & 0x7FF
    finite = exponent != 0x7FF
    sign = 1 - 2 * (bits >> 63 & 1)
    mantissa = (bits & _MANTISSA) | torch.where(exponent > 0, 1 << 52, 0)
    mantissa = torch.where(finite, mantissa, 0)
    place = (exponent - 1).clamp_(min=0)
    first, shift = place >> 5, place & 31
    low, high = (mantissa & _LOW) << shift, (mantissa >> 32) << shift  # below 2^63 and 2^52
    index = rows * PLACES + first
    sums = torch.zeros(count * PLACES, dtype=torch.int64, device=terms.device)
    sums.index_add_(0, index, (low & _LOW) * sign)
    sums.index_add_(0, index + 1, ((low >> 32) + (high & _LOW)) * sign)
    sums.index_add_(0, index + 2, (high >> 32) * sign)
    strange = torch.zeros(count, dtype=torch.float64, device=terms.device)
    strange.index_add_(0, rows, torch.where(finite, 0.0, terms))
    return of_integers(sums.view(count, PLACES), strange)
