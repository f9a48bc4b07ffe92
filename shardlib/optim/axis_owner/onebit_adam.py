"""1-bit Adam (arXiv 2102.02888, algorithm 1)."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch

from shardlib.collectives.codecs.integers import OneBit, scales_of
from shardlib.kernels.frozen_adam import local_momentum_
from shardlib.optim.axis_owner.moments import adam_step, frozen_step
from shardlib.optim.base import GradientTransformation, Owned
from shardlib.optim.checks import check, check_adam, is_step
from shardlib.optim.code import coded
from shardlib.optim.schedules.base import Schedule, as_schedule
from shardlib.optim.shards import Locality, Shards
from shardlib.optim.stepping import ParameterChange, each_tensor, stepping
from shardlib.tree import Tree, tree_map

# The variance is settled when its 1-norm is at least this share of its 1-norm 1/(1 − b2) steps before.
_SETTLED = 0.96


class OneBitAdamState(NamedTuple):
    """The state of `onebit_adam`.

    ``count``: steps taken (0-d float); ``mu``, ``nu``: running means of g and g², where ``nu`` stops at the freeze;
    ``frozen``: 1 from the freeze on (0-d float); ``norm``: Σ|nu| at the last check of "auto" (0-d float64).
    """

    count: torch.Tensor  # type: ignore[assignment]  # optax's name, though tuples have a method of it
    mu: Tree
    nu: Tree
    frozen: torch.Tensor
    norm: torch.Tensor


@coded
def onebit_adam(
    lr: float | Schedule,
    freeze_step: int | str,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    *,
    axis: str = "data",
    scales: str | int = "leaf",
) -> GradientTransformation:
    """Adam that, once its variance is frozen, averages momentum instead of gradients over ``axis``, in one bit per element.

    Update ``−lr·(m/(√v + eps) + weight_decay·p)``, without bias correction. For the first ``freeze_step`` steps gradients
    are averaged in full precision. After that v is frozen: each rank adds its gradient to m, and m is averaged by the
    two-phase 1-bit all-reduce with error feedback (residuals in ``TrainState.comm``). Elements whose v is 0 at the freeze,
    such as embeddings of tokens that never occurred, no longer change (except by weight decay). Some gradients are only
    rounding, such as those of a key's bias under softmax; v is then tiny, and signs are sent all the same. An ``eps`` well
    above √v of such elements (1e-5, for example) keeps their steps small.

    Composes with `shardlib.zero` over other axes: ``zero(1, axis="local", replicate="node")`` with ``axis="node"`` keeps
    full precision inside a node.

    Args:
        freeze_step: the number of steps before the freeze (15 to 25 % of all steps in the paper's runs); or "auto": check
            every 1/(1 − b2) steps, and freeze when the learning rate no longer rises and Σ|v| is at least 0.96 times its
            value at the last check. A restored state that has taken more steps freezes after its next step; a frozen state
            stays frozen.
        axis: the mesh axis whose ranks share the batch and hold the same state.
        scales: "leaf" for one scale per parameter as in the paper, or the number of elements per scale, a multiple of 8.

    Raises:
        ValueError: a hyper-parameter out of range.
        IllegalComposition: ``scales`` is neither.

    >>> def train(mesh):
    ...     params = sl.shard({"w": torch.ones(64, 64)}, mesh, sl.zero(0))
    ...     loss_fn = lambda params, batch: (batch @ params["w"]).square().mean()
    ...     state, train_step = sl.make_train_step(loss_fn, params, sl.optim.onebit_adam(1e-2, freeze_step=2))
    ...     for _ in range(3):
    ...         state, metrics = train_step(state, torch.ones(2, 64))
    ...     return state.step
    >>> sl.simulate(train, mesh=dict(data=2))
    [3, 3]
    """
    check_adam("onebit_adam", b1, b2, eps, weight_decay)
    check(
        "onebit_adam",
        "use the number of steps before the variance is frozen, at least 1 (15 to 25 % of all), or 'auto'",
        freeze_step=(freeze_step, freeze_step == "auto" or is_step(freeze_step)),
    )
    scales = scales_of("onebit_adam", scales)
    rate = as_schedule(lr, "onebit_adam")
    every = round(1 / (1 - b2))

    def init(params: Tree, _: Shards) -> OneBitAdamState:
        none = torch.zeros((), dtype=torch.float64)
        mu, nu = tree_map(torch.zeros_like, params), tree_map(torch.zeros_like, params)
        return OneBitAdamState(torch.zeros(()), mu, nu, torch.zeros(()), none)

    def step(
        params: Tree, grads: Tree, state: OneBitAdamState, scale: torch.Tensor | None, shards: Shards
    ) -> tuple[OneBitAdamState, ParameterChange]:
        size, mu = rate(state.count), state.mu
        after = state._replace(count=state.count + 1)
        if unreduced(state):
            each_tensor(partial(local_momentum_, b1=b1, scale=scale), grads, mu)
            mu = shards.compressed_mean(grads, out=mu)
            return after._replace(mu=mu), frozen_step(mu, state.nu, lr=size, eps=eps, weight_decay=weight_decay)
        options = {"b1": b1, "b2": b2, "eps": eps, "weight_decay": weight_decay}
        move = adam_step(params, grads, mu, state.nu, lr=size, scale=scale, **options)
        return freeze(after, shards), move

    def freeze(state: OneBitAdamState, shards: Shards) -> OneBitAdamState:
        """The state, frozen if the step just taken was the last one before the freeze."""
        count = int(state.count)
        if not isinstance(freeze_step, str):
            return state._replace(frozen=torch.tensor(float(count >= freeze_step)))
        if count % every:
            return state
        norm = shards.sum(partial(torch.sum, dtype=torch.float64), state.nu).to("cpu")  # squares are not negative
        settled = state.norm > 0 and norm >= _SETTLED * state.norm and rate(state.count) <= rate(state.count - 1)
        return state._replace(frozen=torch.tensor(float(settled)), norm=norm)

    owns = Owned("onebit_adam", axis, OneBit(scales), unreduced)
    return stepping("onebit_adam", init, step, Locality.GLOBAL, owns)


def unreduced(state: OneBitAdamState) -> bool:
    """See `shardlib.optim.base.Owned.unreduced`."""
    return bool(state.frozen)
