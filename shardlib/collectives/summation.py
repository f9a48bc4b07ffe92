"""Sums of numbers over elements, micro-batches and ranks: losses, weights, norms.

A `Summation` says how such sums are made. It holds a sum as a vector of float64, and vectors are added: within a rank, and by
one all-reduce between ranks. `IN_FLOAT64` holds the sum itself, so the last bits depend on the order of additions. `EXACT`
holds digits, whose addition does not round: the sum depends neither on the order nor on which rank adds which elements.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch

from shardlib.common.thresholds import chunks
from shardlib.errors import IllegalComposition
from shardlib.kernels import exact_sum, global_norm
from shardlib.kernels.exact_sum import digits


@dataclass(frozen=True)
class SumOf:
    """A sum over elements, which knows its terms: a function of tensors of one shape, which returns the sum, 0-d.

    Attributes:
        terms: ``terms(*tensors)``: the term of each element, elementwise, a float64 tensor.
        fused: ``fused(*tensors)``: the sum in one pass; None to add up the terms.
        exact: ``exact(*tensors)``: the digits of the sum in one pass (see `shardlib.kernels.exact_sum`); None as for fused.

    >>> counts = sl.optim.SumOf(lambda x: (x > 1).double())
    >>> counts(torch.tensor([1.0, 2.0, 3.0]))
    tensor(2., dtype=torch.float64)
    """

    terms: Callable[..., torch.Tensor]
    fused: Callable[..., torch.Tensor] | None = None
    exact: Callable[..., torch.Tensor] | None = None

    def __call__(self, *tensors: torch.Tensor) -> torch.Tensor:
        return self.terms(*tensors).sum() if self.fused is None else self.fused(*tensors)

    def of(self, position: int) -> SumOf:
        """The sum over the tensor at ``position`` among several."""

        def chosen(fn: Callable[..., torch.Tensor] | None) -> Callable[..., torch.Tensor] | None:
            return None if fn is None else lambda *tensors: fn(tensors[position])

        return SumOf(lambda *tensors: self.terms(tensors[position]), chosen(self.fused), chosen(self.exact))


sum_of_squares: SumOf = SumOf(lambda x: x.double().square(), global_norm.sum_of_squares, exact_sum.digits_of_squares)


class Summation(ABC):
    """A way to make sums. Frozen and comparable, since plans contain it.

    Attributes:
        width: numbers that hold one sum.
    """

    width: int

    @abstractmethod
    def over(self, fn: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
        """The sum ``fn`` over the elements of flat tensors, ``[width]``."""

    @abstractmethod
    def numbers(self, values: torch.Tensor) -> torch.Tensor:
        """Each of ``values``, float64 ``[...]``, as a sum of one number: ``[..., width]``."""

    @abstractmethod
    def along(self, grid: torch.Tensor, dim: int) -> torch.Tensor:
        """The sums of ``grid`` over one dimension: ``[..., width]``, with the other dimensions before."""

    @abstractmethod
    def values(self, sums: torch.Tensor) -> torch.Tensor:
        """The sums as float64 numbers: ``[..., width]`` to ``[...]``."""


@dataclass(frozen=True)
class InFloat64(Summation):
    """Sums in float64, each addition rounded."""

    width = 1

    def __str__(self) -> str:
        return "in float64"

    def over(self, fn: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
        return fn(*tensors).reshape(1)

    def numbers(self, values: torch.Tensor) -> torch.Tensor:
        return values[..., None]

    def along(self, grid: torch.Tensor, dim: int) -> torch.Tensor:
        return grid.sum(dim, dtype=torch.float64)[..., None]

    def values(self, sums: torch.Tensor) -> torch.Tensor:
        return sums[..., 0]


@dataclass(frozen=True)
class Exact(Summation):
    """Sums without rounding, except of each term to float64 and of the result."""

    width = digits.COUNT

    def __str__(self) -> str:
        return "exactly"

    def over(self, fn: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
        if not isinstance(fn, SumOf):
            raise IllegalComposition(
                f"reproducible() needs the terms of sums, and {fn!r} returns a sum: pass sl.optim.SumOf(terms)"
            )
        if fn.exact is not None:
            return fn.exact(*tensors)
        total = torch.zeros(self.width, dtype=torch.float64, device=tensors[0].device)
        for chunk in chunks(tensors):
            total += digits.total(fn.terms(*chunk))
        return total

    def numbers(self, values: torch.Tensor) -> torch.Tensor:
        return digits.of_each(values)

    def along(self, grid: torch.Tensor, dim: int) -> torch.Tensor:
        return digits.along(grid.double(), dim)

    def values(self, sums: torch.Tensor) -> torch.Tensor:
        return digits.rounded(sums)


IN_FLOAT64, EXACT = InFloat64(), Exact()
