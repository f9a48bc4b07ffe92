"""Attention of one new token of each of several sequences, which have different lengths, to the keys in a cache.

For sequence i in row r_i of the cache, which holds n_i tokens there, and head h, whose head of keys is g:

- store: K[r_i, g, n_i] = k_i,  V[r_i, g, n_i] = v_i.
- attend: s_t = q_ih · K[r_i, g, t] / √size for max(0, n_i + 1 − window) ≤ t ≤ n_i;  y_ih = Σ_t softmax(s)_t V[r_i, g, t].

q and y are ``[N, heads, size]``, k and v ``[N, kv_heads, size]``, K and V ``[rows, kv_heads, room, size]``, of one dtype:
fp32 or bf16 (fp16 and float64 by plain torch), computed in fp32; g = h // (heads / kv_heads). Bytes moved: the keys and
values that are seen, once for all heads that share them. Operations: 4·size for each head and key, and an exponential. A
sequence's results do not depend on the others. Nothing has gradients.

``using`` names one implementation ("cpu", "reference"), for tests.
"""

from __future__ import annotations

import torch

from shardlib.kernels.cached_attention.arguments import Attention
from shardlib.kernels.common.arguments import check_tensors
from shardlib.kernels.common.dispatch import on, serving

IMPLEMENTATIONS = {"cpu": ("cpu",)}


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
    check_tensors(
        "cached_attention",
        {"q": q, "k": k, "v": v, "keys": keys, "values": values},
    )
    check_tensors(
        "cached_attention", {"rows": rows, "starts": starts}, exactly=dict.fromkeys(("rows", "starts"), torch.int64)
    )
    how = Attention(q, k, v, keys, values, rows, starts, keys.shape[-2] if window is None else window)
    how.check()
    with on(q.device):
        return serving("cached_attention", q, using).attend(how)
