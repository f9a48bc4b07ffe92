"""The first half of a decoder's layer, as its implementations take it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import has_torch_function

from shardlib.kernels.thin_matmul.arguments import Matrix
from shardlib.kernels.thin_matmul.line import line, lines, readable
from shardlib.kernels.thin_matmul.linear import Linear


@dataclass(frozen=True, eq=False)
class Heads:
    """The weights of a norm and of the self-attention after it; all of one dtype.

    Attributes:
        norm: ``[width]``, of an RMSNorm with ``eps``, as all norms here.
        q: weight ``[heads · size, width]``.
        k, v: weight ``[kv_heads · size, width]``; kv_heads divides heads.
        o: weight ``[width, heads · size]``.
        size: of a head, even.
        q_norm, k_norm: ``[size]``, of each head before it is rotated; None for none.
        window: a token sees only so many tokens, itself among them; None for all.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """

    norm: torch.Tensor
    eps: float
    q: Linear
    k: Linear
    v: Linear
    o: Linear
    size: int
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    window: int | None = None

    def __post_init__(self) -> None:
        if self._computes_itself or self._fits():
            return
        shapes = ", ".join(f"{tuple(part.shape)} of {part.dtype}" for part in self._parts if part is not None)
        raise ValueError(
            f"Heads of {shapes}, of size {self.size}: they must be a norm [width], q [heads · size, width], k and v "
            "[kv_heads · size, width], o [width, heads · size], biases [outputs], norms of heads [size], with kv_heads a "
            "divisor of heads and an even size; all of one dtype"
        )

    def of(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values of tokens, ``[T, heads, size]`` and twice ``[T, kv_heads, size]``; arguments as there."""
        normed = F.rms_norm(x, x.shape[-1:], self.norm, self.eps)
        q, k, v = (linear(normed).unflatten(-1, (-1, self.size)) for linear in (self.q, self.k, self.v))
        if self.q_norm is not None:
            q = F.rms_norm(q, q.shape[-1:], self.q_norm, self.eps)
        if self.k_norm is not None:
            k = F.rms_norm(k, k.shape[-1:], self.k_norm, self.eps)
        q, k = _rotated(torch.cat([q, k], 1), cos.unsqueeze(1), sin.unsqueeze(1)).split([q.shape[1], k.shape[1]], 1)
        return q, k, v

    def after(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The tokens ``x`` after this half, ``[T, width]``, of the results of attention, ``[T, heads, size]``."""
        return x + self.o(attended.flatten(1))

    @cached_property
    def lines(self) -> Any:
        """What decoder_attention.cpp calls a layer; None where it cannot read it."""
        if self._computes_itself or not readable(self._parts, self.norm.dtype):
            return None
        return lines(*[line(*linear) for linear in self._linears])

    @property
    def _linears(self) -> tuple[Linear, ...]:
        return self.q, self.k, self.v, self.o

    @property
    def _parts(self) -> tuple[Any, ...]:
        return (self.norm, self.q_norm, self.k_norm, *(part for linear in self._linears for part in linear))

    @cached_property
    def _computes_itself(self) -> bool:
        return has_torch_function(tuple(part for part in self._parts if not isinstance(part, Matrix)))

    def _fits(self) -> bool:
        (width,), size = self.norm.shape, self.size
        wide, narrow = self.q.weight.shape[0], self.k.weight.shape[0]
        wanted: list[tuple[Any, tuple[int, ...]]] = [(self.q_norm, (size,)), (self.k_norm, (size,))]
        for linear, shape in zip(self._linears, ((wide, width), (narrow, width), (narrow, width), (width, wide))):
            wanted += [(linear.weight, shape), (linear.bias, shape[:1])]
        given = [(part, shape) for part, shape in wanted if part is not None]
        return (
            size > 0
            and size % 2 == 0
            and narrow % size == 0 < narrow
            and wide % narrow == 0
            and all(part.shape == shape and part.dtype == self.norm.dtype for part, shape in given)
        )


@dataclass(frozen=True, eq=False)
class Seats:
    """Where sequences stand in a cache.

    Attributes:
        rows: int64 ``[N]``, on the CPU: the row of each sequence, no two the same.
        starts: int64 ``[N]``, on the CPU: the number of tokens that the row holds.
    """

    rows: torch.Tensor
    starts: torch.Tensor

    @cached_property
    def bounds(self) -> tuple[int, int, int]:
        """The least of all numbers, and the largest row and start."""
        if not len(self.rows):
            return 0, -1, -1
        least = min(int(self.rows.min()), int(self.starts.min()))
        return least, int(self.rows.max()), int(self.starts.max())


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Heads ``[T, heads, size]``, whose pairs (x_j, x_j+size/2) are rotated by angles of cos and sin ``[T, 1, size / 2]``."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
