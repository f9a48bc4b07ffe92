"""Sums of matrices as products of two thin factors, with error feedback (PowerSGD, arXiv 1905.13727, algorithms 1 and 2).

A leaf of two or more dimensions is a matrix M ``[n, m]``: its first dimension by all others. With a residual E on each rank:

1. P = (M + E) Q is summed over the ranks and made orthonormal;
2. F = (M + E)ᵀ P is summed over the ranks, and is the next step's Q;
3. the sum is P Qᵀ with this Q. A rank contributed P Fᵀ to it, with its F from before the sum; its next E is M + E − P Fᵀ.

So the sums and the residuals add up to the gradients. Since Q is kept, each step continues one power iteration while
gradients change slowly. Leaves of fewer dimensions, and matrices whose factors would be no smaller, are sent unencoded.

All buffers of an exchange share two all-reduces: one of the Ps; one of the Fs and the unencoded leaves. Each buffer's message
is padded to a multiple of the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

from shardlib.collectives import primitives
from shardlib.collectives.codecs.base import Item, Kept, KeptFactors, Residuals, Rows, SentResidual
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

    def bind(self, rows: Rows) -> BoundLowRank:
        return BoundLowRank(rows, self.rank)

    def exchange(self, mesh: Mesh, axis: str, items: Sequence[Item[BoundLowRank]], residuals: Residuals) -> LowRankSum:
        return LowRankSum(mesh, axis, items, residuals)

    def __str__(self) -> str:
        return f"factors of rank {self.rank}"


class _Matrix(NamedTuple):
    """A leaf that is sent as factors: its number, the index of its first element in the buffer, and its shape as a matrix."""

    leaf: int
    first: int
    n: int
    m: int


class BoundLowRank:
    """The codec bound to a buffer, which needs no padding.

    Attributes:
        elements: lengths of the two messages, padding included.
    """

    rows: Rows

    def __init__(self, rows: Rows, rank: int) -> None:
        self.rows, self._rank = rows, rank
        self._matrices: list[_Matrix] = []
        self._spans: list[tuple[int, int]] = []  # of the unencoded leaves
        for leaf, ((start, _), shape) in enumerate(zip(rows.filled, rows.shapes, strict=True)):
            n, m = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (0, 0)
            if (n + m) * rank < n * m:
                self._matrices.append(_Matrix(leaf, start, n, m))
            else:
                self._spans.append(
                    (start, start + math.prod(shape))
                )  # with the padding, so that all slices are equally long
        self._factors = sum(matrix.m for matrix in self._matrices) * rank
        second = self._factors + sum(stop - start for start, stop in self._spans)
        self.elements: tuple[int, int] = (
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
        """A residual of zeros, and drawn factors."""
        return [torch.zeros(self.rows.elements, dtype=self.rows.dtype, device=device), self._drawn(device)]

    def _drawn(self, device: torch.device) -> torch.Tensor:
        """Factors of normal numbers, the same for all leaves of one width, whatever other leaves the buffer holds."""
        drawn = [torch.zeros(0, dtype=torch.float64)]
        for matrix in self._matrices:
            generator = torch.Generator().manual_seed(_SEED)
            drawn.append(torch.randn(matrix.m * self._rank, generator=generator, dtype=torch.float64))
        return torch.cat(drawn).to(device, self.rows.dtype)

    def revive(self, factors: torch.Tensor) -> torch.Tensor:
        """Draw columns of zeros anew, in place. A step without gradients leaves such columns, and M Q would stay zero."""
        columns = self.right(factors)
        if columns and not torch.stack([q.any(dim=0) for q in columns]).all():
            for q, drawn in zip(columns, self.right(self._drawn(factors.device)), strict=True):
                q.copy_(torch.where(q.any(dim=0), q, drawn))
        return factors

    def matrices(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Views ``[n, m]`` of the leaves of ``buffer`` that are sent as factors."""
        return [buffer[first : first + n * m].view(n, m) for _, first, n, m in self._matrices]

    def rest(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Flat views of the unencoded leaves."""
        return [buffer[start:stop] for start, stop in self._spans]

    def left(self, message: torch.Tensor) -> list[torch.Tensor]:
        """The Ps: views ``[n, rank]`` of the first message."""
        return self._cut(message, [matrix.n for matrix in self._matrices])

    def right(self, message: torch.Tensor) -> list[torch.Tensor]:
        """The Fs or Qs: views ``[m, rank]`` of the second message, or of the kept factors."""
        return self._cut(message, [matrix.m for matrix in self._matrices])

    def _cut(self, message: torch.Tensor, lengths: list[int]) -> list[torch.Tensor]:
        sizes = [length * self._rank for length in lengths]
        return [factor.view(-1, self._rank) for factor in message[: sum(sizes)].split(sizes)] if sizes else []

    def unpacked(self, message: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The second message's factors, flat, and its unencoded leaves, flat."""
        sizes = [stop - start for start, stop in self._spans]
        rest = message[self._factors : self._factors + sum(sizes)]
        return message[: self._factors], list(rest.split(sizes)) if sizes else []


class LowRankSum:
    """The sums (or means) over ``axis`` of buffers of whole leaves, under way.

    Args:
        residuals: the kept tensors of all items, which the exchange replaces.
    """

    def __init__(self, mesh: Mesh, axis: str, items: Sequence[Item[BoundLowRank]], residuals: Residuals) -> None:
        self._mesh, self._axis, self._items, self._residuals = mesh, axis, items, residuals
        self._first = _Sums(mesh, axis, [self._project(item) for item in items])

    def _project(self, item: Item[BoundLowRank]) -> torch.Tensor:
        residual, factors = (self._residuals.after[name] for name in item.kept)
        pairs = zip(item.codec.matrices(item.buffer.add_(residual)), item.codec.right(factors), strict=True)
        return _joined([matrix @ q for matrix, q in pairs], item.buffer, item.codec.elements[0])

    def wait(self, out: Sequence[torch.Tensor | None] | None = None) -> list[torch.Tensor]:
        """Each item's sum: see `shardlib.collectives.codecs.base.SumsUnderWay.wait`."""
        summed = zip(self._items, self._first.wait(), strict=True)
        bases = [[torch.linalg.qr(p).Q for p in item.codec.left(message)] for item, message in summed]
        seconds = [self._second(item, base) for item, base in zip(self._items, bases, strict=True)]
        messages = _Sums(self._mesh, self._axis, seconds).wait()
        outs = [None] * len(messages) if out is None else out
        return [self._result(*each) for each in zip(self._items, bases, messages, outs, strict=True)]

    def _second(self, item: Item[BoundLowRank], bases: list[torch.Tensor]) -> torch.Tensor:
        """The second message. Writes the residual over the buffer."""
        matrices, rest = item.codec.matrices(item.buffer), item.codec.rest(item.buffer)
        factors = [matrix.T @ basis for matrix, basis in zip(matrices, bases, strict=True)]
        message = _joined([*factors, *rest], item.buffer, item.codec.elements[1])
        for matrix, basis, factor in zip(matrices, bases, factors, strict=True):
            matrix.addmm_(basis, factor.T, alpha=-1)
        for leaf in rest:
            leaf.zero_()
        self._residuals.after[item.kept[0]] = item.buffer
        return message

    def _result(
        self, item: Item[BoundLowRank], bases: list[torch.Tensor], message: torch.Tensor, out: torch.Tensor | None
    ) -> torch.Tensor:
        codec = item.codec
        if codec.rows.mean:
            message = message / codec.rows.ways
        factors, rest = codec.unpacked(message)
        self._residuals.after[item.kept[1]] = codec.revive(factors.clone())
        result = torch.empty_like(item.buffer)
        for matrix, basis, factor in zip(codec.matrices(result), bases, codec.right(factors), strict=True):
            torch.mm(basis, factor.T, out=matrix)
        for leaf, summed in zip(codec.rest(result), rest, strict=True):
            leaf.copy_(summed)
        return result if out is None else out.copy_(result)


class _Sums:
    """The sums over ``axis`` of some flat tensors, under way: one message per dtype."""

    def __init__(self, mesh: Mesh, axis: str, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors
        self._messages = {
            dtype: torch.cat([tensor for tensor in tensors if tensor.dtype == dtype])
            for dtype in dict.fromkeys(tensor.dtype for tensor in tensors)
        }
        sent = [message for message in self._messages.values() if message.numel()]
        self._works = [primitives.all_reduce(mesh, axis, message) for message in sent]

    def wait(self) -> list[torch.Tensor]:
        for work in self._works:
            work.wait()
        sums = {
            dtype: iter(message.split([len(tensor) for tensor in self._tensors if tensor.dtype == dtype]))
            for dtype, message in self._messages.items()
        }
        return [next(sums[tensor.dtype]) for tensor in self._tensors]


def _joined(tensors: list[torch.Tensor], like: torch.Tensor, length: int) -> torch.Tensor:
    """The tensors flat, one after another, padded with zeros to ``length``."""
    filled = sum(tensor.numel() for tensor in tensors)
    return torch.cat([*(tensor.reshape(-1) for tensor in tensors), like.new_zeros(length - filled)])
