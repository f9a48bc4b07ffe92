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

``using`` names one implementation ("cpu", "reference"), for tests.
"""

from __future__ import annotations

import torch

from shardlib.common._compat import differentiated
from shardlib.kernels.common.dispatch import on, serving
from shardlib.kernels.decoder_attention.arguments import Heads, Seats

IMPLEMENTATIONS = {"cpu": ("cpu",)}


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
    if not (
        x.shape == (tokens, *norm.shape)
        and cos.shape == sin.shape == (tokens, size // 2)
        and keys.shape == values.shape == (rows, heads, room, size)
        and seats.rows.shape == seats.starts.shape == (tokens,)
        and seats.rows.dtype == seats.starts.dtype == torch.int64
        and {t.dtype for t in (x, cos, sin, keys, values)} == {norm.dtype}
        and {t.device for t in (x, cos, sin, keys, values)} == {norm.device}
        and (layer.lines is None or heads * size == layer.k.weight.shape[0])
        and keys.is_contiguous()
        and values.is_contiguous()
        and least >= 0
        and row < rows
        and start < room
    ):
        shapes = {"x": x, "cos": cos, "sin": sin, "keys": keys, "values": values, "norm": norm}
        raise ValueError(
            f"{', '.join(f'{name} {tuple(t.shape)} of {t.dtype}' for name, t in shapes.items())}, in rows "
            f"{seats.rows.tolist()} that hold {seats.starts.tolist()} tokens: they must be [tokens, width], twice [tokens, "
            f"{size // 2}], twice [rows, kv_heads, room, {size}] and contiguous, and [width], of one dtype and device, and "
            "each row must have room"
        )
    if torch.is_grad_enabled() and differentiated(x):
        raise ValueError("decoder_attention has no gradients: call it under torch.no_grad()")
    with on(x.device):
        return serving("decoder_attention", x, using).apply(x, layer, cos, sin, keys, values, seats)
