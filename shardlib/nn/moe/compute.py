"""The experts' computation: rows of tokens by expert, and products of each expert's rows with its matrix."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch.overrides import handle_torch_function, has_torch_function

from shardlib.kernels.grouped_matmul import grouped_matmul
from shardlib.nn.moe.config import Expert
from shardlib.nn.moe.routing import Routing
from shardlib.tree import leaves_of


class ExpertRows(NamedTuple):
    """Where the assignments of a routing lie among rows that are sorted by expert.

    Attributes:
        positions: ``[T, k]``, int64: the row of each assignment, −1 where it was dropped.
        counts: ``[E]``, int64: rows of each expert. Rows at the end may be left over.
        number: of rows.
    """

    positions: torch.Tensor
    counts: torch.Tensor
    number: int

    @classmethod
    def of(cls, routing: Routing) -> ExpertRows:
        kept, shape, number = routing.kept, routing.experts.shape, len(routing.counts)
        positions = kept.new_full((routing.experts.numel() + 1,), -1)
        positions = positions.scatter(0, kept, torch.arange(kept.shape[0], device=kept.device))[:-1].view(shape)
        experts = torch.cat([routing.experts.flatten(), routing.experts.new_full((1,), number)])[kept]
        ends = torch.searchsorted(experts, torch.arange(number, device=kept.device), right=True)
        return cls(positions, ends.diff(prepend=ends.new_zeros(1)), kept.shape[0])


@dataclass(frozen=True)
class Groups:
    """Rows that are sorted by the expert that computes on them.

    Attributes:
        ends: ``[E]``, int64: the row after each expert's last one.
        number: of rows. Those after the last end have the last expert.
    """

    ends: torch.Tensor
    number: int

    @cached_property
    def experts(self) -> torch.Tensor:
        """``[R]``: the expert of each row."""
        rows = torch.arange(self.number, device=self.ends.device)
        return torch.searchsorted(self.ends, rows, right=True).clamp(max=len(self.ends) - 1)

    def product(self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``rows`` ``[R, in]`` times their experts' ``weight`` ``[E, out, in]``, plus their ``bias`` ``[E, out]``."""
        return expert_linear(rows, weight, bias, self)


def expert_linear(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, groups: Groups) -> torch.Tensor:
    """See `Groups.product`. Of a slice of ``weight`` that `tensor_slicing` cut, its style computes this rank's share.

    A ``weight`` that is no tensor, such as a quantised one, is `grouped_matmul`'s matter.
    """
    tensors = (weight, bias) if isinstance(weight, torch.Tensor) else (bias,)
    if has_torch_function(tensors):
        return handle_torch_function(expert_linear, tensors, rows, weight, bias, groups)
    return grouped_matmul(rows, weight, groups.ends, bias)


# Experts that lie in another memory than the device's, as a layer of experts gets them.


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
