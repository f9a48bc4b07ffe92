"""1-bit LAMB (arXiv 2104.06069, algorithm 1)."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch

from shardlib.collectives.codecs.integers import OneBit, scales_of
from shardlib.collectives.summation import sum_of_squares
from shardlib.kernels.adamw import adam_direction_, direction_at
from shardlib.kernels.frozen_adam import fresh_step_, local_momentum_
from shardlib.optim.axis_owner.moments import root
from shardlib.optim.base import GradientTransformation, Owned
from shardlib.optim.checks import check, check_adam, is_positive, is_share, is_step
from shardlib.optim.code import coded
from shardlib.optim.optimizers.lamb import check_coeffs, coefficients
from shardlib.optim.schedules.base import Schedule, as_schedule
from shardlib.optim.shards import Locality, Shards, device_of
from shardlib.optim.stepping import ParameterChange, each, each_leaf, each_tensor, stepping
from shardlib.tree import Tree, tree_map


class OneBitLambState(NamedTuple):
    """The state of `onebit_lamb`.

    ``count``: steps taken (0-d float); ``mu``, ``nu``: running means of g and g², where ``nu`` stops at the freeze;
    ``frozen``: 1 from the freeze on (0-d float); ``fresh``: 0 before the freeze, then the running mean of g² that continues
    ``nu``, with gradients estimated from momentum. For each parameter, float64 ``[leaf_count]``: ``coeff``, the running mean
    of the trust ratio (the paper's c̄); ``spread``, the factor of momentum before it is sent, which gives all parameters the
    same root mean square; ``factor``, the factor of the trust ratio after the freeze.
    """

    count: torch.Tensor  # type: ignore[assignment]  # optax's name, though tuples have a method of it
    mu: Tree
    nu: Tree
    frozen: torch.Tensor
    fresh: Tree
    coeff: torch.Tensor
    spread: torch.Tensor
    factor: torch.Tensor


@coded
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
    """LAMB that, once its variance is frozen, averages momentum instead of gradients over ``axis``, in one bit per element.

    Update ``−lr·c·u`` with ``u = m/(√v + eps) + weight_decay·p``, without bias correction. For the first ``freeze_step``
    steps c is ‖p‖/‖u‖ clamped to ``min_coeff`` and ``max_coeff``, as in `lamb`, and c̄ is its running mean, from 0, over the
    steps at which c is not 1. After that c = c̄·f. Here f is the maximum of (√v + eps)/(√v̂ + eps) over the parameter's
    elements, where v̂ is the variance continued with gradients estimated from momentum; f is weighted by the share of u that
    is not weight decay, clamped to ``min_factor`` and ``max_factor``, and changes by at most ``factor_threshold`` of its
    value per step. So a parameter with c = 1 at every step before the freeze (one whose norm is always 0, for example) does
    not change after it.

    Other arguments and behaviour are those of `onebit_adam`; defaults are DeepSpeed's.

    Raises:
        ValueError: a hyper-parameter out of range.
        IllegalComposition: ``scales`` is neither "leaf" nor a multiple of 8.

    >>> def train(mesh):
    ...     params = sl.shard({"w": torch.ones(64, 64)}, mesh, sl.zero(0))
    ...     loss_fn = lambda params, batch: (batch @ params["w"]).square().mean()
    ...     state, train_step = sl.make_train_step(loss_fn, params, sl.optim.onebit_lamb(1e-2, freeze_step=2))
    ...     for _ in range(3):
    ...         state, metrics = train_step(state, torch.ones(2, 64))
    ...     return state.step
    >>> sl.simulate(train, mesh=dict(data=2))
    [3, 3]
    """
    check_adam("onebit_lamb", b1, b2, eps, weight_decay)
    check_coeffs("onebit_lamb", min_coeff, max_coeff)
    ordered = is_positive(min_factor) and is_positive(max_factor) and min_factor <= max_factor
    check(
        "onebit_lamb",
        "freeze_step is the number of steps before the variance is frozen, at least 1; coeff_beta is at least 0 and below 1; "
        "min_factor is above 0 and not above max_factor; factor_threshold is above 0 and below 1",
        freeze_step=(freeze_step, is_step(freeze_step)),
        coeff_beta=(coeff_beta, is_share(coeff_beta)),
        min_factor=(min_factor, ordered),
        max_factor=(max_factor, ordered),
        factor_threshold=(factor_threshold, is_positive(factor_threshold) and is_share(factor_threshold)),
    )
    scales = scales_of("onebit_lamb", scales)
    rate = as_schedule(lr, "onebit_lamb")

    def init(params: Tree, shards: Shards) -> OneBitLambState:
        mu, nu, fresh = (tree_map(torch.zeros_like, params) for _ in range(3))
        ones = torch.ones(shards.leaf_count(params), dtype=torch.float64, device=device_of(params))
        coeff = torch.zeros_like(ones)
        return OneBitLambState(torch.zeros(()), mu, nu, torch.zeros(()), fresh, coeff, ones, ones.clone())

    def step(
        params: Tree, grads: Tree, state: OneBitLambState, scale: torch.Tensor | None, shards: Shards
    ) -> tuple[OneBitLambState, ParameterChange]:
        run = compressed if unreduced(state) else warm_up
        after, directions, coeff = run(params, grads, state, scale, shards)
        return after._replace(count=state.count + 1), ParameterChange(
            lambda p, u: u, (directions,), -rate(state.count) * coeff
        )

    def warm_up(params, grads, state, scale, shards):
        direct = partial(adam_direction_, factors=direction_at(None, b1, b2, eps, weight_decay), scale=scale)
        each_tensor(direct, params, grads, state.mu, state.nu)
        coeff = coefficients(params, grads, shards, min_coeff, max_coeff)
        mean = torch.where(coeff != 1, coeff_beta * state.coeff + (1 - coeff_beta) * coeff, state.coeff)
        if int(state.count) + 1 >= freeze_step:
            each(lambda v, fresh: fresh.copy_(v), state.nu, state.fresh)
            state = state._replace(frozen=torch.ones(()), spread=spread_of(state.mu, shards))
        return state._replace(coeff=mean), grads, coeff

    def spread_of(mu: Tree, shards: Shards) -> torch.Tensor:
        squares, sizes = shards.leaf_sums((sum_of_squares, _count), mu)
        means = (squares / sizes.clamp(min=1)).sqrt()
        return torch.where(means == 0, 1.0, means.mean() / means)

    def compressed(params, grads, state, scale, shards):
        def send(number: int, g: torch.Tensor, m: torch.Tensor) -> None:
            local_momentum_(g, m, b1=b1, scale=scale)
            g.mul_(state.spread[number])

        each_leaf(shards, send, grads, state.mu)
        mu, directions = shards.compressed_mean(grads), state.mu  # the old momentum's memory will hold the direction
        for number, tensors in shards.leaves(mu, directions, state.nu, state.fresh):
            fresh_step_(*tensors, spread=state.spread[number], b1=b1, b2=b2, eps=eps)
        factor = shards.leaf_max(lambda v, fresh: (root(v, eps) / root(fresh, eps)).max(), state.nu, state.fresh)
        if weight_decay:
            without_decay = shards.leaf_sums((sum_of_squares,), directions)[0]
            each(lambda u, p: u.add_(p, alpha=weight_decay), directions, params)
            with_decay = shards.leaf_sums((sum_of_squares,), directions)[0]
            weight = torch.where(with_decay == 0, 1.0, (without_decay / with_decay).sqrt().clamp(max=1))
            factor = factor * weight + 1 - weight
        factor = factor.clamp(min_factor, max_factor)
        factor = torch.clamp(factor, state.factor * (1 - factor_threshold), state.factor * (1 + factor_threshold))
        return state._replace(mu=mu, factor=factor), directions, state.coeff * factor

    def unreduced(state: OneBitLambState) -> bool:
        return bool(state.frozen)

    owns = Owned("onebit_lamb", axis, OneBit(scales), unreduced)
    return stepping("onebit_lamb", init, step, Locality.LEAF, owns)


def _count(leaf: torch.Tensor) -> torch.Tensor:
    return torch.tensor(float(leaf.numel()), dtype=torch.float64)
