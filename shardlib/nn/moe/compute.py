"""The experts' computation: rows of tokens by expert, and products of each expert's rows with its matrix."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch.overrides import handle_torch_function, has_torch_function

from shardlib.kernels.grouped_matmul import grouped_matmul
from shardlib.nn.moe.routing import Routing


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
