"""AdamW with moments in 8 bits (arXiv 2110.02861)."""

from __future__ import annotations

from functools import partial

import optree
import torch

from shardlib.kernels.adamw import adamw_, factors_at
from shardlib.kernels.adamw8 import SIGNED, UNSIGNED, adamw8_
from shardlib.optim.base import GradientTransformation, separate_copy
from shardlib.optim.locality import Locality
from shardlib.optim.optimizers.adam import AdamState
from shardlib.optim.optimizers.coded import CodedMoment, zero_moment
from shardlib.optim.ranges import check_adam
from shardlib.optim.schedules.base import Schedule, as_schedule
from shardlib.optim.shards import Shards
from shardlib.tree import Tree, leaves_of, tree_map


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
        if params is None:
            raise ValueError(
                "adamw8bit changes parameters itself, so update needs them: update(updates, state, params)"
            )
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
