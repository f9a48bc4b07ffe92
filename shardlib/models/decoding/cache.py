"""Keys and values of the tokens so far, of the heads that this rank computes, and a step's attention to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F

from shardlib.kernels.cached_attention import cached_attention
from shardlib.kernels.decoder_attention import Seats
from shardlib.nn.attention import attention
from shardlib.sparse import Layout


@dataclass(frozen=True)
class NewTokens:
    """The tokens that one step adds to several sequences, which lie one after the other.

    Attributes:
        rows: the rows of the cache that the sequences have. Sequences with several new tokens come first.
        starts: the number of tokens of each sequence that the cache holds.
        tokens: the new tokens of each sequence, at least one. The first tokens of a sequence come at once.
    """

    rows: Sequence[int]
    starts: Sequence[int]
    tokens: Sequence[Sequence[int]]

    def flat(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and their positions in their sequences, int64 ``[T]`` each."""
        tokens = [token for tokens in self.tokens for token in tokens]
        positions = [start + i for start, tokens in zip(self.starts, self.tokens) for i in range(len(tokens))]
        return torch.tensor([tokens, positions], dtype=torch.int64, device=device).unbind()  # type: ignore[return-value]

    def last(self, device: torch.device) -> torch.Tensor:
        """The index in ``[T]`` of each sequence's last new token, int64."""
        return torch.tensor([len(tokens) for tokens in self.tokens], dtype=torch.int64, device=device).cumsum(0) - 1

    @cached_property
    def prompts(self) -> list[tuple[int, slice]]:
        """The row, and the range in ``[T]``, of each sequence with several new tokens."""
        found, first = [], 0
        for row, tokens in zip(self.rows, self.tokens):
            if len(tokens) > 1:
                found.append((row, slice(first, first + len(tokens))))
                first += len(tokens)
        return found

    @cached_property
    def singles(self) -> tuple[int, Seats]:
        """Of sequences with one new token: their first index in ``[T]``, and where they stand in the cache."""
        count = len(self.prompts)
        rows, starts = (torch.tensor(numbers[count:], dtype=torch.int64) for numbers in (self.rows, self.starts))
        return self.prompts[-1][1].stop if count else 0, Seats(rows, starts)


class Cache:
    """Keys and values of several sequences, ``[rows, kv_heads, room, size]`` for each layer; made when a layer first attends.

    Args:
        rows: the number of sequences.
        room: the tokens of the longest sequence.

    Attributes:
        layers: the keys and values of each layer that has attended.
    """

    def __init__(self, rows: int, room: int) -> None:
        self._rows, self._room = rows, room
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def of(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values of a layer, with room for such as ``k`` and ``v`` ``[T, kv_heads, size]``."""
        if layer not in self.layers:
            keys, values = (x.new_empty(self._rows, x.shape[1], self._room, x.shape[2]) for x in (k, v))
            self.layers[layer] = keys, values
        return self.layers[layer]


class Attend:
    """Attention of a step's new tokens to themselves and to all tokens before them, of their own sequence."""

    def __init__(self, cache: Cache, new: NewTokens) -> None:
        self._cache, self._new = cache, new

    def __call__(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        window: int | None = None,
        layout: Layout | None = None,
    ) -> torch.Tensor:
        """Causal attention of new tokens to all tokens of their sequence so far; stores ``k`` and ``v``.

        Args:
            q: ``[T, heads, size]``, the new tokens of one sequence after the other.
            k, v: ``[T, kv_heads, size]``; kv_heads divides heads.
            window: a token sees only so many tokens, itself among them; None for all.
            layout: a token sees only the blocks of its row; for at least as many tokens as there is room for.

        Returns:
            ``[T, heads, size]``.
        """
        keys, values = self._cache.of(layer, k, v)
        y = torch.empty_like(q)
        for row, here in self._new.prompts:
            count = here.stop - here.start
            keys[row, :, :count], values[row, :, :count] = k[here].transpose(0, 1), v[here].transpose(0, 1)
            y[here] = _prompt(q[here], k[here], v[here], window, layout)
        first, seats = self._new.singles
        if len(seats.rows):
            given = (q[first:], k[first:], v[first:], keys, values, seats.rows, seats.starts)
            y[first:] = cached_attention(*given, window=window) if layout is None else _by_layout(*given, layout)
        return y

    def seated(self, layer: int) -> tuple[torch.Tensor, torch.Tensor, Seats] | None:
        """The keys and values of a layer's cache, ``[rows, kv_heads, room, size]``, and where the sequences stand in it.

        For layers that store and attend themselves (`shardlib.kernels.decoder_attention`), in steps of one new token of each
        sequence; None in other steps.
        """
        held = self._cache.layers.get(layer)
        return None if held is None or self._new.prompts else (*held, self._new.singles[1])


def _prompt(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None, layout: Layout | None
) -> torch.Tensor:
    """Causal attention of a sequence's first tokens, ``[S, heads, size]``."""
    length, grouped = len(q), q.shape[1] != k.shape[1]
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    if layout is not None:
        return attention(q, k, v, causal=True, layout=layout.leading(length))[0].transpose(0, 1)
    if window is None or window >= length:
        return attention(q, k, v, causal=True)[0].transpose(0, 1)
    back = torch.arange(length, device=q.device)
    back = back[:, None] - back
    mask = (back >= 0) & (back < window)
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=grouped)[0].transpose(0, 1)


def _by_layout(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    layout: Layout,
) -> torch.Tensor:
    """Attention of one new token of each sequence to the keys in the blocks of its row; 0 if there are none."""
    layout = layout.to(q.device)
    y = torch.empty_like(q)
    for i, (row, start) in enumerate(zip(rows.tolist(), starts.tolist())):
        keys[row, :, start], values[row, :, start] = k[i], v[i]
        columns, held = layout.row(start // layout.block)
        positions = (columns[:, None] * layout.block + torch.arange(layout.block, device=q.device)).flatten()
        past = positions <= start
        seen_keys, seen_values = (x[row].index_select(1, positions[past]) for x in (keys, values))
        mask = held.repeat_interleave(layout.block, 1)[:, past].unsqueeze(1)
        y[i] = F.scaled_dot_product_attention(q[i].unsqueeze(1), seen_keys, seen_values, mask).squeeze(1)
    return y
