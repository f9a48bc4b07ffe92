"""The key-value cache of one attention layer: what sampling keeps of the tokens so far."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib.nn.attention import attention
from shardlib.sparse import Layout


class Seen:
    """Keys and values of the tokens a layer has seen, as many heads of them as this rank computes.

    Attributes:
        length: tokens seen.
    """

    def __init__(self, room: int) -> None:
        self._room = room
        self._kept: tuple[Tensor, Tensor] | None = None
        self.length = 0

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout | None = None) -> Tensor:
        """Causal attention of new tokens over those so far and themselves, (B, heads, S, size); keeps ``k`` and ``v``.

        Args:
            layout: for at least as many tokens as the cache has room for: each sees what its row has.

        Raises:
            ValueError: no room for them, or several tokens after others: attention would have to mask some of them.
        """
        first = self.length == 0
        k, v = self._extend(k, v)
        if first:
            return attention(q, k, v, causal=True, layout=None if layout is None else layout.leading(self.length))
        return attention(q, k, v) if layout is None else _last(q, k, v, layout.to(q.device))

    def _extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Those of all tokens so far, views of the cache."""
        start, stop = self.length, self.length + k.shape[2]
        if stop > self._room or (start and k.shape[2] > 1):
            raise ValueError(
                f"a cache with room for {self._room} tokens has {start} and gets {k.shape[2]}; give it the prompt at once, "
                "then one token at a time, and start a new one when it is full"
            )
        if self._kept is None:
            self._kept = tuple(new.new_empty(*new.shape[:2], self._room, new.shape[3]) for new in (k, v))  # type: ignore[assignment]
        assert self._kept is not None
        for kept, new in zip(self._kept, (k, v)):
            kept[:, :, start:stop] = new
        self.length = stop
        keys, values = (kept[:, :, :stop] for kept in self._kept)
        return keys, values


def _last(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
    """Attention of the last token, over the keys of its row's blocks alone; 0 where there is none."""
    length, block = k.shape[2], layout.block
    columns, held = layout.row((length - 1) // block)
    places = (columns[:, None] * block + torch.arange(block, device=q.device)).flatten()
    before = places < length
    near, of = (x.index_select(2, places[before]) for x in (k, v))
    mask = held.repeat_interleave(block, 1)[:, before].unsqueeze(1)
    return F.scaled_dot_product_attention(q, near, of, mask)
