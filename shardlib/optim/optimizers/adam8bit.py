"""AdamW with moments in 8 bits (arXiv 2110.02861)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import optree
import torch

from shardlib.kernels.adamw import adamw_, factors_at
from shardlib.kernels.adamw8 import BLOCK, SIGNED, UNSIGNED, DynamicMap, adamw8_
from shardlib.optim.base import GradientTransformation, Packed, require_params, separate_copy
from shardlib.optim.checks import check_adam
from shardlib.optim.code import coded
from shardlib.optim.optimizers.adam import AdamState
from shardlib.optim.schedules.base import Schedule, as_schedule
from shardlib.optim.shards import Locality, Shards
from shardlib.tree import Tree, leaves_of, register_node, tree_map

# Moments in 8 bits, as an optimizer's state holds them for tensors that are large enough.


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


@coded
def adamw8bit(
    lr: float | Schedule, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, weight_decay: float = 1e-4
) -> GradientTransformation:
    """`adamw` whose moments take a quarter of the memory: each one byte per element, and 4 bytes per block of 256 elements.

    Blocks are runs of the tensors that the optimizer gets: on a mesh of each rank's flat shards, which may hold several
    parameters. Tensors of fewer than 4096 elements have moments as in `adamw`. Each step changes parameters by the moments
    before these are rounded; the state has the nearest codes, where a variance above zero never becomes 0. Checkpoints hold
    the decoded moments, and can be restored for `adamw` as well.

    Raises:
        ValueError: a hyper-parameter out of range.

    >>> p, g = {"w": torch.tensor([3.0, 4.0])}, {"w": torch.tensor([0.6, -0.8])}
    >>> tx = sl.optim.adamw8bit(0.1)
    >>> updates, state = tx.update(g, tx.init(p), p)
    >>> updates["w"]
    tensor([-0.1000,  0.1000])
    """
    check_adam("adamw8bit", b1, b2, eps, weight_decay)
    rate = as_schedule(lr, "adamw8bit")

    def init(params: Tree, _: Shards) -> AdamState:
        mu, nu = (tree_map(partial(zero_moment, coding=coding), params) for coding in (SIGNED, UNSIGNED))
        return AdamState(torch.zeros(()), mu, nu)

    def update(updates: Tree, state: AdamState, params: Tree, *, shards: Shards) -> tuple[Tree, AdamState]:
        require_params("adamw8bit", params)
        # By `apply`, since another rounding of a moment could give another code.
        moved, copied = tree_map(torch.clone, params), tree_map(torch.clone, state)
        after = apply(moved, updates, copied, None, shards, moved)
        return tree_map(torch.sub, moved, params), after

    def apply(
        params: Tree, updates: Tree, state: AdamState, scale: torch.Tensor | None, shards: Shards, copies: Tree
    ) -> AdamState:
        after = state._replace(count=state.count + 1)
        factors = factors_at(float(after.count), float(rate(state.count)), b1, b2, eps, weight_decay)
        trees = (*map(leaves_of, (params, updates, copies)), *map(_moments, (state.mu, state.nu)))
        for p, g, copy, m, v in zip(*trees, strict=True):
            if isinstance(m, CodedMoment):
                assert isinstance(v, CodedMoment)
                adamw8_(p, g, *m.in_memory, *v.in_memory, factors, scale=scale, copy=separate_copy(copy, p))
            else:
                adamw_(p, g, m, v, factors, scale=scale, copy=separate_copy(copy, p))
        return after

    return GradientTransformation(init, update, Locality.ELEMENTWISE, apply=apply)


def _moments(tree: Tree) -> list[CodedMoment | torch.Tensor]:
    return optree.tree_leaves(tree, is_leaf=lambda node: isinstance(node, CodedMoment))
