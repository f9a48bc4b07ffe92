"""Attention of one new token of each of several sequences, which have different lengths, to the keys in a cache.

For sequence i in row r_i of the cache, which holds n_i tokens there, and head h, whose head of keys is g:

- store: K[r_i, g, n_i] = k_i,  V[r_i, g, n_i] = v_i.
- attend: s_t = q_ih · K[r_i, g, t] / √size for max(0, n_i + 1 − window) ≤ t ≤ n_i;  y_ih = Σ_t softmax(s)_t V[r_i, g, t].

q and y are ``[N, heads, size]``, k and v ``[N, kv_heads, size]``, K and V ``[rows, kv_heads, room, size]``, of one dtype:
fp32 or bf16 (fp16 and float64 by plain torch), computed in fp32; g = h // (heads / kv_heads). Bytes moved: the keys and
values that are seen, once for all heads that share them. Operations: 4·size for each head and key, and an exponential. A
sequence's results do not depend on the others. Nothing has gradients.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from shardlib.common.thresholds import threads
from shardlib.kernels.common import native
from shardlib.kernels.common.arguments import check_tensors
from shardlib.kernels.common.dispatch import Plain, on, serving

__all__ = ["cached_attention"]

IMPLEMENTATIONS: dict[str, tuple[str, ...]] = {"cpu": ("cpu",)}


class CachedAttention(NamedTuple):
    """The arguments of `cached_attention`; ``window`` is at least 1."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    rows: torch.Tensor
    starts: torch.Tensor
    window: int

    def check(self) -> None:
        """Refuses shapes, dtypes and places with which a kernel would read or write wrongly.

        Raises:
            ValueError: they do not fit.
        """
        q, k, v, keys, values, rows, starts, window = self
        tensors = {name: x for name, x in self._asdict().items() if isinstance(x, torch.Tensor)}
        if (
            [x.dim() for x in tensors.values()] != [3, 3, 3, 4, 4, 1, 1]
            or k.shape != v.shape
            or keys.shape != values.shape
            or k.shape != (len(q), keys.shape[1], q.shape[2])
            or keys.shape[3] != q.shape[2]
            or q.shape[1] % max(1, k.shape[1])
            or not len(q) == len(rows) == len(starts)
        ):
            shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in tensors.items())
            raise ValueError(f"{shapes}: they do not fit. help(cached_attention) has the shapes")
        if len({x.dtype for x in (q, k, v, keys, values)}) > 1:
            dtypes = ", ".join(f"{name} {x.dtype}" for name, x in list(tensors.items())[:5])
            raise ValueError(f"{dtypes}: cast them to one")
        if not (keys.is_contiguous() and values.is_contiguous()):
            raise ValueError("keys and values are filled in place, so they must be contiguous")
        if window < 1:
            raise ValueError(f"window={window}: a token sees itself at least")
        if len(q) and not (
            0 <= int(rows.min()) <= int(rows.max()) < len(keys)
            and 0 <= int(starts.min()) <= int(starts.max()) < keys.shape[2]
        ):
            cache = f"the cache has {len(keys)} rows, room for {keys.shape[2]} tokens each"
            raise ValueError(f"rows {rows.tolist()} and starts {starts.tolist()}: {cache}")


def cached_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    *,
    window: int | None = None,
    using: str | None = None,
) -> torch.Tensor:
    """The attention of new tokens, ``[N, heads, size]``; stores their keys and values in ``keys`` and ``values``, in place.

    Args:
        q: ``[N, heads, size]``, one token of each sequence.
        k, v: ``[N, kv_heads, size]``; kv_heads divides heads.
        keys, values: ``[rows, kv_heads, room, size]``, contiguous.
        rows: int64 ``[N]``, on the CPU: the row of each sequence, no two the same.
        starts: int64 ``[N]``, on the CPU: the number of tokens that the row holds.
        window: the number of tokens that a token sees, itself among them; None for all.

    Raises:
        ValueError: shapes or dtypes that do not fit, or a row that is full.

    >>> from shardlib.kernels.cached_attention import cached_attention
    >>> keys, values = torch.zeros(1, 1, 4, 2), torch.zeros(1, 1, 4, 2)
    >>> q, v = torch.zeros(1, 2, 2), torch.ones(1, 1, 2)  # two heads share a head of keys
    >>> cached_attention(q, v, v, keys, values, torch.tensor([0]), torch.tensor([1])).flatten()
    tensor([0.5000, 0.5000, 0.5000, 0.5000])
    """
    check_tensors("cached_attention", {"q": q, "k": k, "v": v, "keys": keys, "values": values})
    numbers = {"rows": rows, "starts": starts}  # on the CPU, wherever the others are
    check_tensors("cached_attention", numbers, exactly=dict.fromkeys(numbers, torch.int64))
    how = CachedAttention(q, k, v, keys, values, rows, starts, keys.shape[-2] if window is None else window)
    how.check()
    with on(q.device):
        return serving("cached_attention", q, using).attend(how)


class reference(Plain):
    """In plain torch, one sequence after the other."""

    @staticmethod
    def attend(how: CachedAttention) -> torch.Tensor:
        y = torch.empty_like(how.q)
        grouped = how.q.shape[1] != how.k.shape[1]
        for i, (row, start) in enumerate(zip(how.rows.tolist(), how.starts.tolist())):
            how.keys[row, :, start], how.values[row, :, start] = how.k[i], how.v[i]
            seen = slice(max(0, start + 1 - how.window), start + 1)
            keys, values = how.keys[row, :, seen], how.values[row, :, seen]
            # A batch of one: torch's fused attention takes four dimensions.
            q, keys, values = (x.unsqueeze(0) for x in (how.q[i].unsqueeze(1), keys, values))
            y[i] = F.scaled_dot_product_attention(q, keys, values, enable_gqa=grouped)[0, :, 0]
        return y


class cpu(native.Compiled, cached_attention="pppppppillllllppi"):
    """By cached_attention.cpp."""

    @staticmethod
    def attend(how: CachedAttention) -> torch.Tensor:
        if how.q.dtype == torch.float16:
            return reference.attend(how)
        q, k, v = (x.contiguous() for x in (how.q, how.k, how.v))
        (number, heads, size), (_, kv_heads, room, _) = q.shape, how.keys.shape
        scores, y = torch.empty(number * heads * room), torch.empty_like(q)
        sizes = (native.DTYPES[q.dtype], number, heads, kv_heads, room, size, how.window)
        cpu.library().cached_attention(
            q, k, v, how.keys, how.values, how.rows, how.starts, *sizes, scores, y, threads()
        )
        return y
