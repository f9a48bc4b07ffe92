"""The key-value cache of one attention layer: what sampling keeps of the tokens so far."""

from __future__ import annotations

from torch import Tensor


class Seen:
    """Keys and values of the tokens a layer has seen, as many heads of them as this rank computes.

    Attributes:
        length: tokens seen.
    """

    def __init__(self, room: int) -> None:
        self._room = room
        self._kept: tuple[Tensor, Tensor] | None = None
        self.length = 0

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add ``k`` and ``v`` (B, heads, S, size); returns those of all tokens so far, views of the cache.

        Raises:
            ValueError: no room for them, or several tokens after others: attention would have to mask some of them.
        """
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
