"""y = x + W_o attention(norm(x)) of one new token x of each of several sequences: the first half of a decoder's layer, as in
Llama and the models after it.

With n = w·x/√(mean(x²) + ε):

- heads: q = W_q n, k = W_k n, v = W_v n, plus biases where there are any; where there are norms of heads, each head of q and
  of k is normed as x was.
- rotary: each pair (a, b) = (q_j, q_j+size/2) becomes (a cos_j − b sin_j, b cos_j + a sin_j), and so of k.
- attention to the cache, in which k and v are stored: `shardlib.kernels.cached_attention`.

x and y are ``[T, width]`` in fp32 or bf16 (fp16 and float64 by plain torch), weights, angles and cache of that dtype, or
weights quantised. Results are rounded to it after each product, norm, rotation and attention. Bytes moved: those of the
weights, once for up to 32 tokens, and of the keys and values that are seen. More tokens are products of torch's. Nothing has
gradients. It is one call for the reason that `shardlib.kernels.decoder_mlp` is. A token's results do not depend on others.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F

from shardlib.common._compat import differentiated
from shardlib.common.thresholds import threads
from shardlib.kernels.cached_attention import cached_attention
from shardlib.kernels.common import native
from shardlib.kernels.common.dispatch import Plain, on, serving
from shardlib.kernels.thin_matmul import FEW, DecoderWeights, Linear

__all__ = ["Heads", "Seats", "decoder_attention"]

IMPLEMENTATIONS: dict[str, tuple[str, ...]] = {"cpu": ("cpu",)}


@dataclass(frozen=True, eq=False)
class Heads(DecoderWeights):
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

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.q, self.k, self.v, self.o

    @property
    def others(self) -> tuple[torch.Tensor | None, ...]:
        return self.q_norm, self.k_norm

    def shapes(self) -> list[tuple[Any, tuple[int, ...]]] | None:
        (width,), size = self.norm.shape, self.size
        wide, narrow = self.q.weight.shape[0], self.k.weight.shape[0]
        if size <= 0 or size % 2 or narrow % size or not narrow or wide % narrow:
            return None
        wanted = zip(self.linears, ((wide, width), (narrow, width), (narrow, width), (width, wide)))
        parts = [each for part, shape in wanted for each in ((part.weight, shape), (part.bias, shape[:1]))]
        return [*parts, (self.q_norm, (size,)), (self.k_norm, (size,))]

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


def decoder_attention(
    x: torch.Tensor,
    layer: Heads,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    seats: Seats,
    *,
    using: str | None = None,
) -> torch.Tensor:
    """The tokens after the first half of a layer, ``[T, width]``, without gradients; stores their keys and values, in place.

    Args:
        x: ``[T, width]``, one token of each sequence, of the layer's dtype.
        cos, sin: ``[T, size / 2]``, of the angles of each token's position.
        keys, values: ``[rows, kv_heads, room, size]``, contiguous.
        seats: of the T sequences.

    Raises:
        ValueError: shapes or dtypes that do not fit, a row that is full, or an ``x`` that needs gradients where they are
            recorded.

    >>> from shardlib.kernels.decoder_attention import Heads, Seats, decoder_attention
    >>> from shardlib.kernels.thin_matmul import Linear
    >>> one = Linear(torch.ones(2, 1))
    >>> layer = Heads(torch.ones(1), 0.0, one, one, one, Linear(torch.ones(1, 2)), size=2)
    >>> keys, values = torch.zeros(1, 1, 4, 2), torch.zeros(1, 1, 4, 2)
    >>> angles = torch.ones(1, 1), torch.zeros(1, 1)
    >>> decoder_attention(torch.tensor([[3.0]]), layer, *angles, keys, values, Seats(torch.tensor([0]), torch.tensor([0])))
    tensor([[5.]])
    """
    tokens, norm, size = len(x), layer.norm, layer.size
    rows, heads, room = keys.shape[:3] if keys.dim() == 4 else (0, 0, 0)
    least, row, start = seats.bounds
    given = {"x": x, "cos": cos, "sin": sin, "keys": keys, "values": values}
    if not (
        x.shape == (tokens, *norm.shape)
        and cos.shape == sin.shape == (tokens, size // 2)
        and keys.shape == values.shape == (rows, heads, room, size)
        and seats.rows.shape == seats.starts.shape == (tokens,)
        and seats.rows.dtype == seats.starts.dtype == torch.int64
        and {(t.dtype, t.device) for t in given.values()} == {(norm.dtype, norm.device)}
        and (layer.lines is None or heads * size == layer.k.weight.shape[0])
        and keys.is_contiguous()
        and values.is_contiguous()
        and least >= 0
        and row < rows
        and start < room
    ):
        tensors = ", ".join(f"{name} {tuple(t.shape)} of {t.dtype}" for name, t in given.items())
        held = f"rows {seats.rows.tolist()} with {seats.starts.tolist()} tokens"
        raise ValueError(f"{tensors}, {held}: they do not fit. help(decoder_attention) has the shapes")
    if torch.is_grad_enabled() and differentiated(x):
        raise ValueError("decoder_attention has no gradients: call it under torch.no_grad()")
    with on(x.device):
        return serving("decoder_attention", x, using).apply(x, layer, cos, sin, keys, values, seats)


class reference(Plain):
    """In plain torch, one operation after the other."""

    @staticmethod
    def apply(x: torch.Tensor, layer: Heads, *rest: Any) -> torch.Tensor:
        cos, sin, keys, values, seats = rest
        given = (*layer.of(x, cos, sin), keys, values, seats.rows, seats.starts)
        return layer.after(x, cached_attention(*given, window=layer.window))


class cpu(native.Compiled, decoder_attention="pilppppfppppppllllpi"):
    """By decoder_attention.cpp, for few tokens."""

    @staticmethod
    def apply(x: torch.Tensor, layer: Heads, *rest: Any) -> torch.Tensor:
        lines = layer.lines
        if lines is None or len(x) > FEW():
            return reference.apply(x, layer, *rest)
        cos, sin, keys, values, seats = rest
        x, y = x.contiguous(), torch.empty(x.shape, dtype=x.dtype)
        _, heads, room, size = keys.shape
        cpu.library().decoder_attention(
            *(x, native.DTYPES[x.dtype], len(x), lines, layer.norm, layer.q_norm, layer.k_norm, layer.eps),
            *(cos.contiguous(), sin.contiguous(), keys, values, seats.rows.contiguous(), seats.starts.contiguous()),
            *(heads, room, size, room if layer.window is None else layer.window, y, threads()),
        )
        return y
