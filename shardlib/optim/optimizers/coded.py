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
class Coded(Packed):
    """A coded moment. A pytree.

    Attributes:
        codes: uint8, in the shape of the parameter.
        scales: fp32, one for each block.
        coding: the map from codes to numbers.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    coding: DynamicMap

    block = BLOCK

    @property
    def like(self) -> torch.Tensor:
        return torch.empty(self.codes.shape, dtype=torch.float32, device="meta")

    def part(self, first: int, stop: int) -> torch.Tensor:
        return self.coding.decode(*self._coded(first, stop))

    def pack(self, values: torch.Tensor, first: int = 0) -> None:
        for held, new in zip(self._coded(first, first + values.numel()), self.coding.encode(values), strict=True):
            held.copy_(new.view(-1))

    def _coded(self, first: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The codes and scales of elements ``first`` to ``stop``: views."""
        return self.codes.view(-1)[first:stop], self.scales[first // BLOCK : -(-stop // BLOCK)]


def zero_moment(param: torch.Tensor, coding: DynamicMap) -> Coded | torch.Tensor:
    """The initial moment of ``param``: coded, unless ``param`` is small."""
    if param.numel() < _SMALL:
        return torch.zeros_like(param)
    codes = torch.zeros(param.shape, dtype=torch.uint8, device=param.device)
    blocks = (param.numel() + BLOCK - 1) // BLOCK
    return Coded(codes, torch.zeros(blocks, dtype=torch.float32, device=param.device), coding)


def _build(coding: DynamicMap, children: Any) -> Coded:
    codes, scales = children
    return Coded(codes, scales, coding)


register_node(Coded, lambda node: ((node.codes, node.scales), node.coding), _build)
