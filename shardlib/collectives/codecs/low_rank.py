"""Sums of matrices as products of two thin factors, with error feedback (PowerSGD, arXiv 1905.13727, algorithms 1 and 2).

A leaf of two or more dimensions is a matrix M ``[n, m]``: its first dimension, and the others. With an error E on each rank:

1. P = (M + E) Q is summed over the ranks and made orthonormal;
2. F = (M + E)ᵀ P is summed over the ranks, and is the next step's Q;
3. the sum is P Qᵀ, of which P Fᵀ is a rank's own share; E is what that lacks of M + E.

So the sums and the errors add up to the gradients. Warm starts make steps one power iteration, as long as gradients are
alike. Leaves of fewer dimensions, and matrices whose factors are no smaller than they are, travel as they are.

There are two all-reduces for all the buffers of an exchange: of the Ps; and of the Fs and of what travels as it is. Each
buffer's part of either is padded to a multiple of the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

from shardlib.collectives import primitives
from shardlib.collectives.codecs.base import Errors, Item, Kept, KeptFactors, Rows, SentResidual
from shardlib.mesh.mesh import Mesh

_SEED = 0


@dataclass(frozen=True)
class LowRank:
    """A codec for buffers of whole leaves.

    Attributes:
        rank: columns of the factors.
    """

    rank: int = 4
    wide: ClassVar[bool] = True
    whole: ClassVar[bool] = True

    def bind(self, rows: Rows) -> Factors:
        return Factors(rows, self.rank)

    def exchange(self, mesh: Mesh, axis: str, items: Sequence[Item[Factors]], errors: Errors) -> LowRankSum:
        return LowRankSum(mesh, axis, items, errors)

    def __str__(self) -> str:
        return f"factors of rank {self.rank}"


class _Matrix(NamedTuple):
    """A leaf that travels as factors: its number, the elements before it in the buffer, and its shape as a matrix."""

    leaf: int
    first: int
    n: int
    m: int


class Factors:
    """A buffer some of whose leaves travel as factors. It needs no padding.

    Attributes:
        elements: of the two messages, padding included.
    """

    def __init__(self, rows: Rows, rank: int) -> None:
        self.rows, self._rank = rows, rank
        self._matrices: list[_Matrix] = []
        self._spans: list[tuple[int, int]] = []  # of what travels as it is
        for leaf, ((start, _), shape) in enumerate(zip(rows.filled, rows.shapes, strict=True)):
            n, m = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (0, 0)
            if (n + m) * rank < n * m:
                self._matrices.append(_Matrix(leaf, start, n, m))
            else:
                self._spans.append((start, start + math.prod(shape)))  # with what pads a slice: its ranks send as much
        self._factors = sum(matrix.m for matrix in self._matrices) * rank
        second = self._factors + sum(stop - start for start, stop in self._spans)
        self.elements = (
            self._padded(sum(matrix.n for matrix in self._matrices) * rank),
            self._padded(second),
        )

    def _padded(self, elements: int) -> int:
        return -(-elements // self.rows.ways) * self.rows.ways

    @property
    def keeps(self) -> tuple[Kept, ...]:
        shapes = tuple((matrix.leaf, (matrix.m, self._rank)) for matrix in self._matrices)
        return SentResidual(self.rows.elements), KeptFactors(self._factors, shapes)

    @property
    def payload(self) -> int:
        ways = self.rows.ways
        return 2 * (ways - 1) * sum(self.elements) // ways * self.rows.dtype.itemsize

    def pad(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def start(self, device: torch.device) -> list[torch.Tensor]:
        """Errors of 0, and factors as they are drawn."""
        return [torch.zeros(self.rows.elements, dtype=self.rows.dtype, device=device), self._drawn(device)]

    def _drawn(self, device: torch.device) -> torch.Tensor:
        """Factors of normal numbers, the same for all leaves of a width, whatever lies beside them."""
        drawn = [torch.zeros(0, dtype=torch.float64)]
        for matrix in self._matrices:
            generator = torch.Generator().manual_seed(_SEED)
            drawn.append(torch.randn(matrix.m * self._rank, generator=generator, dtype=torch.float64))
        return torch.cat(drawn).to(device, self.rows.dtype)

    def revive(self, factors: torch.Tensor) -> torch.Tensor:
        """Draw columns of zeros anew, in place: a step without gradients leaves them, and P would see nothing later."""
        columns = self.right(factors)
        if columns and not torch.stack([q.any(dim=0) for q in columns]).all():
            for q, drawn in zip(columns, self.right(self._drawn(factors.device)), strict=True):
                q.copy_(torch.where(q.any(dim=0), q, drawn))
        return factors

    def matrices(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Views ``[n, m]`` of a buffer."""
        return [buffer[first : first + n * m].view(n, m) for _, first, n, m in self._matrices]

    def rest(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Flat views of what travels as it is."""
        return [buffer[start:stop] for start, stop in self._spans]

    def left(self, message: torch.Tensor) -> list[torch.Tensor]:
        """Views ``[n, rank]`` of the first message."""
        return self._cut(message, [matrix.n for matrix in self._matrices])

    def right(self, message: torch.Tensor) -> list[torch.Tensor]:
        """Views ``[m, rank]`` of the second message, or of the factors that are kept."""
        return self._cut(message, [matrix.m for matrix in self._matrices])

    def _cut(self, message: torch.Tensor, lengths: list[int]) -> list[torch.Tensor]:
        sizes = [length * self._rank for length in lengths]
        return [part.view(-1, self._rank) for part in message[: sum(sizes)].split(sizes)] if sizes else []

    def unpacked(self, message: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The second message as its factors and what travelled as it is, flat."""
        sizes = [stop - start for start, stop in self._spans]
        rest = message[self._factors : self._factors + sum(sizes)]
        return message[: self._factors], list(rest.split(sizes)) if sizes else []


class LowRankSum:
    """Buffers of whole leaves on their way to their sum (or mean) over ``axis``.

    Args:
        errors: of all items; written to.
    """

    def __init__(self, mesh: Mesh, axis: str, items: Sequence[Item[Factors]], errors: Errors) -> None:
        self._mesh, self._axis, self._items, self._errors = mesh, axis, items, errors
        self._first = _Sums(mesh, axis, [self._project(item) for item in items])

    def _project(self, item: Item[Factors]) -> torch.Tensor:
        error, factors = (self._errors.after[name] for name in item.kept)
        pairs = zip(item.line.matrices(item.buffer.add_(error)), item.line.right(factors), strict=True)
        return _joined([matrix @ q for matrix, q in pairs], item.buffer, item.line.elements[0])

    def wait(self, out: Sequence[torch.Tensor | None] | None = None) -> list[torch.Tensor]:
        """Each item's whole buffer, in ``out`` where given."""
        arrived = zip(self._items, self._first.wait(), strict=True)
        bases = [[torch.linalg.qr(p).Q for p in item.line.left(message)] for item, message in arrived]
        answers = [self._answer(item, own) for item, own in zip(self._items, bases, strict=True)]
        messages = _Sums(self._mesh, self._axis, answers).wait()
        places = [None] * len(messages) if out is None else out
        return [self._result(*each) for each in zip(self._items, bases, messages, places, strict=True)]

    def _answer(self, item: Item[Factors], bases: list[torch.Tensor]) -> torch.Tensor:
        """The second message; what it leaves out is written over the buffer."""
        matrices, rest = item.line.matrices(item.buffer), item.line.rest(item.buffer)
        factors = [matrix.T @ basis for matrix, basis in zip(matrices, bases, strict=True)]
        message = _joined([*factors, *rest], item.buffer, item.line.elements[1])
        for matrix, basis, factor in zip(matrices, bases, factors, strict=True):
            matrix.addmm_(basis, factor.T, alpha=-1)
        for part in rest:
            part.zero_()
        self._errors.after[item.kept[0]] = item.buffer
        return message

    def _result(
        self, item: Item[Factors], bases: list[torch.Tensor], message: torch.Tensor, out: torch.Tensor | None
    ) -> torch.Tensor:
        line = item.line
        if line.rows.mean:
            message = message / line.rows.ways
        factors, rest = line.unpacked(message)
        self._errors.after[item.kept[1]] = line.revive(factors.clone())
        result = torch.empty_like(item.buffer)
        for matrix, basis, factor in zip(line.matrices(result), bases, line.right(factors), strict=True):
            torch.mm(basis, factor.T, out=matrix)
        for place, part in zip(line.rest(result), rest, strict=True):
            place.copy_(part)
        return result if out is None else out.copy_(result)


class _Sums:
    """Flat tensors on their way to their sums, all of a dtype in one message."""

    def __init__(self, mesh: Mesh, axis: str, parts: list[torch.Tensor]) -> None:
        self._parts = parts
        self._messages = {
            dtype: torch.cat([part for part in parts if part.dtype == dtype])
            for dtype in dict.fromkeys(part.dtype for part in parts)
        }
        sent = [message for message in self._messages.values() if message.numel()]
        self._works = [primitives.all_reduce(mesh, axis, message) for message in sent]

    def wait(self) -> list[torch.Tensor]:
        for work in self._works:
            work.wait()
        cut = {
            dtype: iter(message.split([len(part) for part in self._parts if part.dtype == dtype]))
            for dtype, message in self._messages.items()
        }
        return [next(cut[part.dtype]) for part in self._parts]


def _joined(parts: list[torch.Tensor], like: torch.Tensor, length: int) -> torch.Tensor:
    """Tensors one after another, flat, and zeros up to a length."""
    filled = sum(part.numel() for part in parts)
    return torch.cat([*(part.reshape(-1) for part in parts), like.new_zeros(length - filled)])
