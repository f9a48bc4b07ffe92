"""PowerSGD (arXiv 1905.13727, algorithms 1 and 2), step by step, every rank in a loop. Imports nothing from shardlib."""

import math

import torch


def orthonormal(p):
    """The columns' Gram-Schmidt basis; each is projected twice, as rounding asks for."""
    basis = []
    for column in p.unbind(1):
        for _ in range(2):
            for other in basis:
                column = column - (other @ column) * other
        basis.append(column / column.norm())
    return torch.stack(basis, dim=1)


class PowerSGD:
    """The sum (or mean) of one leaf over ranks.

    Attributes:
        residuals: each rank's, in the leaf's shape.
        q: the factor that the next step starts from; None for a leaf that is sent as it is.
    """

    def __init__(self, ranks, shape, rank, *, mean=False, dtype=torch.float64):
        self.ranks, self.shape, self.mean = ranks, shape, mean
        self.residuals = [torch.zeros(shape, dtype=dtype) for _ in range(ranks)]
        self.q = None
        if len(shape) >= 2:
            n, m = shape[0], math.prod(shape[1:])
            if (n + m) * rank < n * m:
                generator = torch.Generator().manual_seed(0)
                self.q = torch.randn(m, rank, generator=generator, dtype=torch.float64).to(dtype)

    def __call__(self, grads):
        weight = 1 / self.ranks if self.mean else 1.0
        if self.q is None:
            return sum(grads) * weight
        matrices = [(grad + error).flatten(1) for grad, error in zip(grads, self.residuals, strict=True)]
        p = orthonormal(sum(matrix @ self.q for matrix in matrices))
        factors = [matrix.T @ p for matrix in matrices]
        self.residuals = [(x - p @ f.T).view(self.shape) for x, f in zip(matrices, factors, strict=True)]
        self.q = sum(factors) * weight
        return (p @ self.q.T).view(self.shape)
