"""Experts that lie in another memory than the device's, as a layer of experts gets them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from shardlib.nn.moe.compute import Groups
from shardlib.nn.moe.config import Expert
from shardlib.tree import leaves_of


class StoredExperts:
    """A leaf of experts that are not on the device.

    Attributes:
        shape, dtype: of the leaf, the experts along dimension 0.
        store: what brings the layer's experts to the device.
        device: the device; until `to`, where the leaf was.
    """

    requires_grad = False

    def __init__(self, shape: torch.Size, dtype: torch.dtype, store: ExpertStore, device: torch.device) -> None:
        self.shape, self.dtype, self.store, self.device = shape, dtype, store, device

    def to(self, device: torch.device) -> StoredExperts:
        """The same for ``device``, to which its experts come one by one."""
        return StoredExperts(self.shape, self.dtype, self.store, device)


class ExpertStore(ABC):
    """What brings the experts of one layer to the device when they have rows. For one layer's run at a time."""

    @staticmethod
    def of(params: Mapping[str, Any]) -> ExpertStore | None:
        """The store of a layer's parameters; None if they are on the device."""
        return next((leaf.store for leaf in leaves_of(params) if isinstance(leaf, StoredExperts)), None)

    @abstractmethod
    def expect(self, x: torch.Tensor) -> None:
        """Note the layer's inputs ``[T, W]``, before its tokens travel: they tell what later layers may need."""

    @abstractmethod
    def each(self, params: Mapping[str, Any], ends: torch.Tensor) -> Iterator[tuple[slice, Mapping[str, Any]]]:
        """The rows of one expert after the other, in any order, with its parameters, ``[1, …]``, until the next one is taken.

        Args:
            params: of the layer, each leaf a `StoredExperts` one.
            ends: ``[E]``, int64: the row after each expert's last one. Without any rows one expert comes, for no rows.
        """

    def outputs(
        self, expert: Expert, params: Mapping[str, Any], rows: torch.Tensor, ends: torch.Tensor
    ) -> torch.Tensor:
        """The experts' outputs for ``rows`` that are sorted by expert; 0 for those from the last end on."""
        results = None
        for here, one in self.each(params, ends):
            part = expert(
                one, rows[here], Groups(ends.new_full((1,), here.stop - here.start), here.stop - here.start).product
            )
            if results is None:
                results = part.new_zeros(len(rows), *part.shape[1:])
            results[here] = part
        assert results is not None
        return results
