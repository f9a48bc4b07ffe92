"""The arguments of attention to a cache, as its implementations take them."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Attention(NamedTuple):
    """See `shardlib.kernels.cached_attention.op`; ``window`` is at least 1."""

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
        shapes = ", ".join(
            f"{name} {tuple(x.shape)}" for name, x in self._asdict().items() if isinstance(x, torch.Tensor)
        )
        number = (len(q),)
        if (
            q.dim() != 3
            or k.dim() != 3
            or keys.dim() != 4
            or k.shape != v.shape
            or keys.shape != values.shape
            or k.shape != (*number, keys.shape[1], q.shape[2])
            or keys.shape[3] != q.shape[2]
            or q.shape[1] % max(1, k.shape[1])
            or rows.shape != number
            or starts.shape != number
        ):
            raise ValueError(
                f"{shapes}: they must be [N, heads, size], twice [N, kv_heads, size], twice [rows, kv_heads, room, size] and "
                "twice [N], with kv_heads a divisor of heads"
            )
        if len({x.dtype for x in (q, k, v, keys, values)}) > 1:
            raise ValueError(
                f"q is {q.dtype}, k {k.dtype}, v {v.dtype}, keys {keys.dtype}, values {values.dtype}: cast them"
            )
        if not (keys.is_contiguous() and values.is_contiguous()):
            raise ValueError("keys and values are filled in place, so they must be contiguous")
        if window < 1:
            raise ValueError(f"window={window}: a token sees itself at least")
        if len(q) and not (
            0 <= int(rows.min()) <= int(rows.max()) < len(keys)
            and 0 <= int(starts.min()) <= int(starts.max()) < keys.shape[2]
        ):
            raise ValueError(
                f"rows {rows.tolist()} and starts {starts.tolist()}: the cache has {len(keys)} rows, with room for "
                f"{keys.shape[2]} tokens each"
            )
