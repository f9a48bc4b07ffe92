"""The key-value cache of one attention layer, for sampling token by token."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib.nn.attention import attention
from shardlib.sparse import Layout


class Seen:
    """Keys and values of the tokens that a layer has seen, of the heads that this rank computes.

    Attributes:
        length: the number of tokens seen.
    """

    def __init__(self, room: int) -> None:
        self._room = room
        self._kept: tuple[Tensor, Tensor] | None = None
        self.length = 0

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout | None = None) -> Tensor:
        """Causal attention of new tokens over all tokens so far, (B, heads, S, size); stores ``k`` and ``v``.

        Args:
            layout: for at least as many tokens as the cache has room for; a token sees the blocks of its row.

        Raises:
            ValueError: the cache is full, or several tokens follow earlier ones, which would need a mask.
        """
        first = self.length == 0
        k, v = self._extend(k, v)
        if first:
            return attention(q, k, v, causal=True, layout=None if layout is None else layout.leading(self.length))
        return attention(q, k, v) if layout is None else _last(q, k, v, layout.to(q.device))

    def _extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values of all tokens so far, as views of the cache, after storing the new ones."""
        start, stop = self.length, self.length + k.shape[2]
        if stop > self._room or (start and k.shape[2] > 1):
            raise ValueError(
                f"a cache with room for {self._room} tokens has {start} and gets {k.shape[2]}; give it the prompt at once, "
                "then one token at a time, and start a new one when it is full"
            )
        if self._kept is None:
            self._kept = tuple(new.new_empty(*new.shape[:2], self._room, new.shape[3]) for new in (k, v))  # type: ignore[assignment]
        assert self._kept is not None
        for buffer, new in zip(self._kept, (k, v)):
            buffer[:, :, start:stop] = new
        self.length = stop
        keys, values = (buffer[:, :, :stop] for buffer in self._kept)
        return keys, values


def _last(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
    """Attention of the last token over the keys in the blocks of its row; 0 if there are none."""
    length, block = k.shape[2], layout.block
    columns, held = layout.row((length - 1) // block)
    positions = (columns[:, None] * block + torch.arange(block, device=q.device)).flatten()
    past = positions < length
    keys, values = (x.index_select(2, positions[past]) for x in (k, v))
    mask = held.repeat_interleave(block, 1)[:, past].unsqueeze(1)
    return F.scaled_dot_product_attention(q, keys, values, mask)
