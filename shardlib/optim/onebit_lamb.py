"""1-bit LAMB (arXiv 2104.06069, algorithm 1)."""

from __future__ import annotations

from typing import NamedTuple

import torch

from shardlib.collectives.codecs import OneBit
from shardlib.optim.base import GradientTransformation, Owned
from shardlib.optim.lamb import check_coeffs, coefficients
from shardlib.optim.locality import Locality
from shardlib.optim.moments import direction, mask, moments, own_momentum, root
from shardlib.optim.ranges import check, check_adam, is_step
from shardlib.optim.schedules import Schedule, as_schedule
from shardlib.optim.shards import Shards, device_of, sum_of_squares
from shardlib.optim.stepping import Move, each, each_leaf, stepping
from shardlib.transforms.onebit import check_scales
from shardlib.tree import Tree, tree_map


class OneBitLambState(NamedTuple):
    """What 1-bit LAMB remembers.

    ``count``: steps taken (0-d float); ``mu``, ``nu``: running means of g and g², ``nu`` as it was frozen; ``fresh``: the
    mean of g² that goes on, from what momentum tells of gradients (0 before the freeze). For each parameter, float64
    ``[leaf_count]``: ``coeff``, the running mean of the trust ratio (c̄ of the paper); ``spread``, what momentum is multiplied
    by before it is sent, so that all have the same mean size; ``factor``, by how much the trust ratio is changed.
    """

    count: torch.Tensor  # type: ignore[assignment]  # optax's name, though tuples have a method of it
    mu: Tree
    nu: Tree
    fresh: Tree
    coeff: torch.Tensor
    spread: torch.Tensor
    factor: torch.Tensor


def onebit_lamb(
    lr: float | Schedule,
    freeze_step: int,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    *,
    min_coeff: float = 0.01,
    max_coeff: float = 10.0,
    coeff_beta: float = 0.9,
    min_factor: float = 0.5,
    max_factor: float = 4.0,
    factor_threshold: float = 0.1,
    axis: str = "data",
    scales: str | int = "leaf",
) -> GradientTransformation:
    """LAMB that, its variance frozen, averages momentum over ``axis`` in one bit per element instead of gradients.

    Update ``−lr·c·u`` with ``u = m/(√v + eps) + weight_decay·p``, without bias correction. For the first ``freeze_step``
    steps c is ‖p‖/‖u‖ within ``min_coeff`` and ``max_coeff``, as `lamb`'s, and c̄ its running mean over the steps at which it
    is not 1, from 0. Then c = c̄·f: f is the largest (√v + eps)/(√v̂ + eps) of the parameter's elements, v̂ being the variance
    as it would have become, as far as it can be told from momentum; weighed by the part of u that is not weight decay,
    kept within ``min_factor`` and ``max_factor``, and changed by at most ``factor_threshold`` a step. A parameter with c = 1
    at every step before the freeze (its norm always 0, say) therefore stays where it is after it.

    Otherwise as `onebit_adam`; defaults as DeepSpeed's.

    Raises:
        ValueError: a hyper-parameter out of range.
        IllegalComposition: ``scales`` is neither "leaf" nor a multiple of 8.
    """
    check_adam("onebit_lamb", b1, b2, eps, weight_decay)
    check_coeffs("onebit_lamb", min_coeff, max_coeff)
    check(
        "onebit_lamb",
        "freeze_step is the number of steps before the variance is frozen, at least 1; coeff_beta is at least 0 and below 1; "
        "min_factor is above 0 and not above max_factor; factor_threshold is above 0 and below 1",
        freeze_step=(freeze_step, is_step(freeze_step)),
        coeff_beta=(coeff_beta, 0 <= coeff_beta < 1),
        min_factor=(min_factor, 0 < min_factor <= max_factor),
        max_factor=(max_factor, 0 < min_factor <= max_factor),
        factor_threshold=(factor_threshold, 0 < factor_threshold < 1),
    )
    check_scales(scales, "onebit_lamb")
    rate = as_schedule(lr)

    def init(params: Tree, shards: Shards) -> OneBitLambState:
        mu, nu, fresh = (tree_map(torch.zeros_like, params) for _ in range(3))
        ones = torch.ones(shards.leaf_count(params), dtype=torch.float64, device=device_of(params))
        return OneBitLambState(torch.zeros(()), mu, nu, fresh, torch.zeros_like(ones), ones, ones.clone())

    def step(
        params: Tree, grads: Tree, state: OneBitLambState, scale: torch.Tensor | None, shards: Shards
    ) -> tuple[OneBitLambState, Move]:
        run = compressed if unreduced(state) else warm_up
        after, directions, coeff = run(params, grads, state, scale, shards)
        return after._replace(count=state.count + 1), Move(lambda p, u: u, (directions,), -rate(state.count) * coeff)

    def warm_up(params, grads, state, scale, shards):
        def direct(p: torch.Tensor, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> None:
            moments(g, m, v, b1, b2, scale)
            g.copy_(direction(p, m, v, eps, weight_decay))

        each(direct, params, grads, state.mu, state.nu)
        coeff = coefficients(params, grads, shards, min_coeff, max_coeff)
        mean = torch.where(coeff != 1, coeff_beta * state.coeff + (1 - coeff_beta) * coeff, state.coeff)
        if int(state.count) + 1 == freeze_step:
            each(lambda v, fresh: fresh.copy_(v), state.nu, state.fresh)
            state = state._replace(spread=spread_of(state.mu, shards))
        return state._replace(coeff=mean), grads, coeff

    def spread_of(mu: Tree, shards: Shards) -> torch.Tensor:
        squares, sizes = shards.leaf_sums((sum_of_squares, _count), mu)
        means = (squares / sizes.clamp(min=1)).sqrt()
        return torch.where(means > 0, means.mean() / means, 1.0)

    def compressed(params, grads, state, scale, shards):
        def send(number: int, g: torch.Tensor, m: torch.Tensor) -> None:
            own_momentum(g, m, b1, scale).mul_(state.spread[number])

        def receive(number: int, m: torch.Tensor, before: torch.Tensor, v: torch.Tensor, fresh: torch.Tensor) -> None:
            mask(m.div_(state.spread[number]), v)
            g = torch.sub(m, before, alpha=b1).div_(1 - b1)
            fresh.mul_(b2).addcmul_(g, g, value=1 - b2)
            torch.div(m, root(v, eps), out=before)  # the last momentum's memory now holds the direction

        each_leaf(shards, send, grads, state.mu)
        mu, directions = shards.compressed_mean(grads), state.mu
        each_leaf(shards, receive, mu, directions, state.nu, state.fresh)
        factor = shards.leaf_max(lambda v, fresh: (root(v, eps) / root(fresh, eps)).max(), state.nu, state.fresh)
        if weight_decay:
            plain = shards.leaf_sums((sum_of_squares,), directions)[0]
            each(lambda u, p: u.add_(p, alpha=weight_decay), directions, params)
            whole = shards.leaf_sums((sum_of_squares,), directions)[0]
            part = torch.where(whole > 0, (plain / whole).sqrt().clamp(max=1), 1.0)
            factor = factor * part + 1 - part
        factor = factor.clamp(min_factor, max_factor)
        factor = torch.clamp(factor, state.factor * (1 - factor_threshold), state.factor * (1 + factor_threshold))
        return state._replace(mu=mu, factor=factor), directions, state.coeff * factor

    def unreduced(state: OneBitLambState) -> bool:
        return int(state.count) >= freeze_step

    owns = Owned("onebit_lamb", axis, OneBit(scales), unreduced)
    return stepping("onebit_lamb", init, step, Locality.LEAF, owns)


def _count(leaf: torch.Tensor) -> torch.Tensor:
    return torch.tensor(float(leaf.numel()), dtype=torch.float64)
