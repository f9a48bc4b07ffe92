"""`Cache`: keys and values of the tokens so far, of the heads that this rank computes; `Attending`: a step's use of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from shardlib.errors import TreeError
from shardlib.kernels.cached_attention import cached_attention
from shardlib.kernels.decoder_attention import Seats
from shardlib.models.decoding.new import New
from shardlib.nn.attention import attention
from shardlib.sparse import Layout


class Cache:
    """Keys and values of several sequences, ``[rows, heads, room, size]`` for each layer; made when a layer first attends.

    Args:
        rows: the number of sequences.
        room: the tokens of the longest sequence.
    """

    def __init__(self, rows: int, room: int) -> None:
        self._rows, self._room = rows, room
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def attend(
        self,
        new: New,
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
        keys, values = self._buffers(layer, k, v)
        y = torch.empty_like(q)
        for row, here in new.prompts:
            count = here.stop - here.start
            keys[row, :, :count], values[row, :, :count] = k[here].transpose(0, 1), v[here].transpose(0, 1)
            y[here] = _prompt(q[here], k[here], v[here], window, layout)
        first, seats = new.singles
        if len(seats.rows):
            given = (q[first:], k[first:], v[first:], keys, values, seats.rows, seats.starts)
            y[first:] = cached_attention(*given, window=window) if layout is None else _by_layout(*given, layout)
        return y

    def held(self, layer: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The keys and values of a layer, ``[rows, kv_heads, room, size]`` each; None before it has attended."""
        return self._layers.get(layer)

    def _buffers(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if layer not in self._layers:
            keys, values = (x.new_empty(self._rows, x.shape[1], self._room, x.shape[2]) for x in (k, v))
            self._layers[layer] = keys, values
        return self._layers[layer]


class Attending:
    """What a step's new tokens attend to, as decoders take it."""

    def __init__(self, cache: Cache, new: New) -> None:
        self._cache, self._new = cache, new

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **how: Any) -> torch.Tensor:
        return self._cache.attend(self._new, layer, q, k, v, **how)

    def seated(self, layer: int) -> tuple[torch.Tensor, torch.Tensor, Seats] | None:
        """See `Attend.seated`."""
        held = self._cache.held(layer)
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


# Sliding windows of transformers' decoders: which layers have one, as each architecture computes them.
# Configurations may have settings that their models ignore, so what a setting means is stated by kind of model.


# ``windows(config)``: the sliding window of each layer, None for attention to all tokens.
Windows = Callable[[Any], Sequence[int | None]]


def nowhere(config: Any) -> list[int | None]:
    """No layer has a window, whatever the configuration says."""
    return [None] * config.num_hidden_layers


def everywhere(config: Any) -> list[int | None]:
    """Every layer has the window ``sliding_window``, or none where that is None; ``layer_types`` is not read."""
    return [config.sliding_window] * config.num_hidden_layers


def by_layer(config: Any) -> list[int | None]:
    """The layers have a window that ``layer_types`` calls "sliding_attention".

    Raises:
        TreeError: other kinds of layers than that and "full_attention".
    """
    windows = {"full_attention": None, "sliding_attention": config.sliding_window}
    unknown = sorted(set(config.layer_types) - set(windows))
    if unknown:
        raise TreeError(f"generate cannot run layers of the types {', '.join(unknown)}; it knows {', '.join(windows)}")
    return [windows[kind] for kind in config.layer_types]
