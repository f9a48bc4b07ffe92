"""Moments in 8 bits, as an optimizer's state holds them for tensors that are large enough."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from shardlib.kernels.adamw8 import BLOCK, DynamicMap
from shardlib.optim.base import Packed
from shardlib.tree import register_node

_SMALL = 4096  # elements; moments of smaller tensors stay in fp32, as in the paper (arXiv 2110.02861, section 2)


@dataclass(frozen=True)
class CodedMoment(Packed):
    """A coded moment. A pytree, whose tensors may lie elsewhere (on disk) between updates.

    Attributes:
        codes: uint8, in the shape of the parameter.
        scales: fp32, one for each block.
        coding: the map from codes to numbers.
    """

    codes: torch.Tensor | Packed
    scales: torch.Tensor | Packed
    coding: DynamicMap

    @property
    def block(self) -> int:
        return self.codes.block if isinstance(self.codes, Packed) else BLOCK

    @property
    def in_memory(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and scales, during an update."""
        assert isinstance(self.codes, torch.Tensor) and isinstance(self.scales, torch.Tensor)
        return self.codes, self.scales

    @property
    def like(self) -> torch.Tensor:
        codes = self.codes.like if isinstance(self.codes, Packed) else self.codes
        return torch.empty(codes.shape, dtype=torch.float32, device="meta")

    def part(self, first: int, stop: int) -> torch.Tensor:
        codes = _part(self.codes, first, stop)
        return self.coding.decode(codes, _part(self.scales, first // BLOCK, -(-stop // BLOCK)))

    def pack(self, values: torch.Tensor, first: int = 0) -> None:
        codes, scales = self.coding.encode(values)
        _pack(self.codes, codes.view(-1), first)
        _pack(self.scales, scales.view(-1), first // BLOCK)


def _part(held: torch.Tensor | Packed, first: int, stop: int) -> torch.Tensor:
    return held.part(first, stop) if isinstance(held, Packed) else held.view(-1)[first:stop]


def _pack(held: torch.Tensor | Packed, values: torch.Tensor, first: int) -> None:
    if isinstance(held, Packed):
        held.pack(values, first)
    else:
        held.view(-1)[first : first + values.numel()] = values


def zero_moment(param: torch.Tensor, coding: DynamicMap) -> CodedMoment | torch.Tensor:
    """The initial moment of ``param``: coded, unless ``param`` is small."""
    if param.numel() < _SMALL:
        return torch.zeros_like(param)
    codes = torch.zeros(param.shape, dtype=torch.uint8, device=param.device)
    blocks = (param.numel() + BLOCK - 1) // BLOCK
    return CodedMoment(codes, torch.zeros(blocks, dtype=torch.float32, device=param.device), coding)


def _build(coding: DynamicMap, children: Any) -> CodedMoment:
    codes, scales = children
    return CodedMoment(codes, scales, coding)


register_node(CodedMoment, lambda node: ((node.codes, node.scales), node.coding), _build)
