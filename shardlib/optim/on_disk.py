"""`OnDisk`: what stands in a train state for a tensor that lies on disk between updates."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from shardlib.optim.base import Packed
from shardlib.sharded.disk import Flat, Store
from shardlib.tree import leaves_of


class HasStore(Protocol):
    """What keeps a store open."""

    store: Store


class OnDisk(Packed):
    """A tensor of a train state that lies on disk between updates. Checkpoints read it and write it whole."""

    rounds = False

    def __init__(self, states: HasStore, name: str, shape: torch.Size, flat: Flat) -> None:
        self._states, self.name, self.shape, self._flat = states, name, shape, flat
        self.block = max(1, flat.numel)

    @property
    def store(self) -> Store:
        """Where it lies."""
        return self._states.store

    @property
    def like(self) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self._flat.dtype, device="meta")

    def part(self, first: int, stop: int) -> torch.Tensor:
        lent = self.store.fetch(self.name).result()
        values = lent[first:stop].clone()
        self.store.release(lent)
        return values

    def pack(self, values: torch.Tensor, first: int = 0) -> None:
        flat = values.reshape(-1)
        if flat.numel() < self._flat.numel:
            lent = self.store.fetch(self.name).result()
            lent[first : first + flat.numel()] = flat
            flat = lent
        self.store.write(self.name, flat)
        self.store.flush()  # what fails is this call's error

    def __repr__(self) -> str:
        return f"OnDisk({self.name}, {list(self.shape)}, {self._flat.dtype})"


def stores_of(tree: Any) -> list[Store]:
    """The stores in which tensors of a tree lie."""
    stores = {id(leaf.store): leaf.store for leaf in leaves_of(tree) if isinstance(leaf, OnDisk)}
    return list(stores.values())
