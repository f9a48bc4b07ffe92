"""0/1 Adam (arXiv 2202.06009, algorithm 1)."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch

from shardlib.collectives.codecs.integers import OneBit, check_scales
from shardlib.kernels.frozen_adam import local_step_
from shardlib.optim.axis_owner.moments import adam_step, frozen_step, mask, root
from shardlib.optim.axis_owner.zero_one_steps import Sent, ZeroOneSteps
from shardlib.optim.base import GradientTransformation, Owned
from shardlib.optim.locality import Locality
from shardlib.optim.ranges import check_adam
from shardlib.optim.schedules.base import Schedule, as_schedule
from shardlib.optim.shards import Shards
from shardlib.optim.stepping import Move, each, each_tensor, stepping
from shardlib.tree import Tree, tree_map


class ZeroOneAdamState(NamedTuple):
    """What 0/1 Adam remembers.

    ``count``: steps taken (0-d float); ``mu``, ``nu``: running means of g and g². From the first step with a frozen
    variance on: ``frozen``, 1 (0-d float); ``anchor``, the parameters that all ranks had last; ``moved``, how far this rank's
    have gone since; ``elapsed``, the sum of learning rates since (0-d float64). ``diverged``: 1 from a step that sends
    nothing to the next that does (0-d float).
    """

    count: torch.Tensor  # type: ignore[assignment]  # optax's name, though tuples have a method of it
    mu: Tree
    nu: Tree
    frozen: torch.Tensor
    anchor: Tree
    moved: Tree
    elapsed: torch.Tensor
    diverged: torch.Tensor

    def rank_local(self) -> tuple[str, ...]:
        """See `shardlib.optim.base.RankLocal`."""
        return ("mu", "moved") if self.diverged else ()

    def held_trees(self) -> tuple[str, ...]:
        """See `shardlib.optim.base.Holding`."""
        return ("anchor",) if self.frozen else ()


def zero_one_adam(
    lr: float | Schedule,
    var_freeze_step: int,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    *,
    var_update_scaler: int = 16,
    local_step_scaler: int = 32678,
    local_step_clipper: int = 16,
    axis: str = "data",
    scales: str | int = "leaf",
) -> GradientTransformation:
    """Adam that sends gradients in one bit per element over ``axis``, and after ``var_freeze_step`` at most steps nothing.

    Which step does what, `ZeroOneSteps` says. Until the variance is frozen, gradients are averaged at every step: in full
    precision where the variance takes them up too, at others in one bit, for momentum alone. Then each rank takes steps of
    its own, ``−lr·m/(√v + eps)``, and remembers how far it went; at some of them what ranks went, as momentum, is averaged
    in one bit and all go there from where they last were together.

    Weight decay is decoupled. While ranks go on their own it waits for the next such step, and is then taken from the
    parameters they all had: ``−Σlr·weight_decay·p``; the paper has none.

    Between these steps ``state.params`` is **this rank's own**, and so is what is evaluated with it; its ranks' losses
    differ a little. To evaluate what all have, do it at a step that sends: ``ZeroOneSteps(...).sent(state.step) is
    Sent.ONE_BIT`` (skipped steps do not count). A checkpoint keeps every rank's own, and on another number of ranks goes on
    from their mean.

    Args:
        var_update_scaler, local_step_scaler, local_step_clipper: see `ZeroOneSteps`.
        axis: over which ranks share the batch and hold the same state.
        scales: "leaf", one scale for each parameter, or elements per block, a multiple of 8.

    Raises:
        ValueError: a hyper-parameter out of range; in a step, a state that was frozen before ``var_freeze_step``.
        IllegalComposition: ``scales`` is neither.

    >>> def train(mesh):
    ...     params = sl.shard({"w": torch.ones(64, 64)}, mesh, sl.zero(0))
    ...     loss_fn = lambda params, batch: (batch @ params["w"]).square().mean()
    ...     state, train_step = sl.make_train_step(loss_fn, params, sl.optim.zero_one_adam(1e-2, var_freeze_step=2))
    ...     for _ in range(3):
    ...         state, metrics = train_step(state, torch.ones(2, 64))
    ...     return state.step
    >>> sl.simulate(train, mesh=dict(data=2))
    [3, 3]
    """
    check_adam("zero_one_adam", b1, b2, eps, weight_decay)
    check_scales(scales, "zero_one_adam")
    steps = ZeroOneSteps(var_freeze_step, var_update_scaler, local_step_scaler, local_step_clipper)
    rate = as_schedule(lr, "zero_one_adam")

    def init(params: Tree, _: Shards) -> ZeroOneAdamState:
        mu, nu, anchor, moved = (tree_map(torch.zeros_like, params) for _ in range(4))
        elapsed, diverged = torch.zeros((), dtype=torch.float64), torch.zeros(())
        return ZeroOneAdamState(torch.zeros(()), mu, nu, torch.zeros(()), anchor, moved, elapsed, diverged)

    def step(
        params: Tree, grads: Tree, state: ZeroOneAdamState, scale: torch.Tensor | None, shards: Shards
    ) -> tuple[ZeroOneAdamState, Move]:
        number = coming(state)
        run = alone if steps.frozen(number) else together
        after, move = run(params, grads, state, scale, shards, number)
        return after._replace(count=state.count + 1), move

    def together(params, grads, state, scale, shards, number):
        size = rate(state.count)
        if steps.sent(number) is Sent.FULL:
            options = {"b1": b1, "b2": b2, "eps": eps, "weight_decay": weight_decay}
            move = adam_step(params, grads, state.mu, state.nu, lr=size, scale=scale, **options)
        else:
            if scale is not None:
                each(lambda g: g.mul_(scale), grads)
            each(lambda m, g: m.lerp_(g, 1 - b1), state.mu, shards.compressed_mean(grads))
            move = frozen_step(state.mu, state.nu, lr=size, eps=eps, weight_decay=weight_decay)
        return state, move

    def alone(params, grads, state, scale, shards, number):
        if not state.frozen:
            each(lambda anchor, p: anchor.copy_(p), state.anchor, params)
            shards.reset_residuals()  # they are of gradients; what follows is momentum
            state = state._replace(frozen=torch.ones(()))
        size = rate(state.count)
        elapsed = state.elapsed + size

        local = partial(local_step_, lr=size, b1=b1, eps=eps, scale=scale)
        each_tensor(local, grads, state.mu, state.nu, state.moved)
        # Where the learning rate was 0 all the while, nobody went anywhere.
        if steps.sent(number) is Sent.NOTHING or elapsed == 0:
            return state._replace(elapsed=elapsed, diverged=torch.ones(())), Move(
                lambda p, anchor, moved: anchor + moved, (state.anchor, state.moved), absolute=True
            )

        def send(g: torch.Tensor, v: torch.Tensor, moved: torch.Tensor) -> None:
            torch.mul(moved, root(v, eps), out=g)
            moved.zero_()

        def meet(mean: torch.Tensor, v: torch.Tensor, anchor: torch.Tensor) -> None:
            mask(mean, v)
            if weight_decay:
                anchor.mul_(1 - elapsed * weight_decay)
            anchor.add_(torch.div(mean, root(v, eps)))
            mean.div_(-elapsed)

        each(send, grads, state.nu, state.moved)
        mu = shards.compressed_mean(grads, out=state.mu)
        each(meet, mu, state.nu, state.anchor)
        after = state._replace(mu=mu, elapsed=torch.zeros_like(elapsed), diverged=torch.zeros(()))
        return after, Move(lambda p, anchor: anchor, (state.anchor,), absolute=True)

    def coming(state: ZeroOneAdamState) -> int:
        number = int(state.count) + 1
        if state.frozen and not steps.frozen(number):
            raise ValueError(
                f"zero_one_adam(var_freeze_step={var_freeze_step}): the variance of this state is frozen, after {number - 1} "
                "steps, and ranks may have gone on their own; give the var_freeze_step that it was trained with"
            )
        return number

    def unreduced(state: ZeroOneAdamState) -> bool:
        return steps.sent(coming(state)) is not Sent.FULL

    owns = Owned("zero_one_adam", axis, OneBit(scales), unreduced)
    last = "zero_one_adam brings ranks together that had diverged, and what follows it in the chain would change by how much"
    return stepping("zero_one_adam", init, step, Locality.GLOBAL, owns, last=last)
