"""0/1 Adam (arXiv 2202.06009, algorithm 1)."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from shardlib.collectives.codecs.integers import OneBit, scales_of
from shardlib.kernels.frozen_adam import local_step_
from shardlib.optim.axis_owner.moments import adam_step, frozen_step, mask, root
from shardlib.optim.base import GradientTransformation, Owned
from shardlib.optim.checks import check, check_adam, is_step
from shardlib.optim.code import coded
from shardlib.optim.schedules.base import Schedule, as_schedule
from shardlib.optim.shards import Locality, Shards
from shardlib.optim.stepping import ParameterChange, each, each_tensor, stepping
from shardlib.tree import Tree, tree_map

# The schedule of what 0/1 Adam sends, as a pure function of the step's number (arXiv 2202.06009, section 4).


class Sent(enum.Enum):
    """The values that a step of 0/1 Adam sends over the optimizer's axis."""

    FULL = "full precision"
    ONE_BIT = "1 bit"
    NOTHING = "nothing"


@dataclass(frozen=True)
class ZeroOneSteps:
    """The steps at which 0/1 Adam sends in full precision, in one bit, or nothing.

    Up to step ``var_freeze_step`` + 1 (as in the paper's counts), every step whose number the variance interval divides sends
    in full precision, and the others in one bit. The interval is 1 and doubles after every ``var_update_scaler`` steps in
    full precision. After that, every step whose number the local interval divides sends in one bit, and the others nothing.
    The local interval is 1 and doubles after every ``local_step_scaler`` steps, up to ``local_step_clipper``.

    Raises:
        ValueError: an argument is not an integer above 0.

    >>> steps = sl.optim.ZeroOneSteps(var_freeze_step=2, local_step_scaler=2, local_step_clipper=2)
    >>> [steps.sent(step).value for step in range(1, 9)]
    ['full precision', 'full precision', 'full precision', '1 bit', '1 bit', '1 bit', 'nothing', '1 bit']
    """

    var_freeze_step: int
    var_update_scaler: int = 16
    local_step_scaler: int = 32678
    local_step_clipper: int = 16

    def __post_init__(self) -> None:
        check(
            "zero_one_adam",
            "give whole numbers of steps, at least 1 (the paper's: 16, 32678, 16)",
            **{name: (value, is_step(value)) for name, value in vars(self).items()},
        )

    def sent(self, step: int) -> Sent:
        """The kind of message that step number ``step``, from 1, sends."""
        if not self.frozen(step):
            return Sent.ONE_BIT if step % self._variance_interval(step) else Sent.FULL
        return Sent.NOTHING if step % self._local_interval(step) else Sent.ONE_BIT

    def frozen(self, step: int) -> bool:
        """Whether the variance is frozen at step number ``step``."""
        return step > self.var_freeze_step + 1

    def count(self, steps: int) -> Mapping[Sent, int]:
        """The number of steps among the first ``steps`` that send each `Sent`."""
        counts = dict.fromkeys(Sent, 0)
        for step in range(1, steps + 1):
            counts[self.sent(step)] += 1
        return counts

    def _variance_interval(self, step: int) -> int:
        interval, last = 1, 0
        while True:
            first = (last // interval + 1) * interval
            last = first + (self.var_update_scaler - 1) * interval
            if step <= last:
                return interval
            interval *= 2

    def _local_interval(self, step: int) -> int:
        doublings = (step - self.var_freeze_step - 2) // self.local_step_scaler
        # The clipper need not be a power of two. Powers far above it are not computed.
        return min(2 ** min(doublings, self.local_step_clipper.bit_length()), self.local_step_clipper)


class ZeroOneAdamState(NamedTuple):
    """The state of `zero_one_adam`.

    ``count``: steps taken (0-d float); ``mu``, ``nu``: running means of g and g². From the first step with a frozen
    variance on: ``frozen``, 1 (0-d float); ``anchor``, the last parameters that were equal on all ranks; ``moved``, the
        change
    of this rank's parameters since; ``elapsed``, the sum of learning rates since (0-d float64). ``diverged``: 1 from a step
    that sends nothing until the next step that sends (0-d float).
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
        """See `shardlib.optim.base.StateMethods`."""
        return ("mu", "moved") if self.diverged else ()

    def held_trees(self) -> tuple[str, ...]:
        """See `shardlib.optim.base.StateMethods`."""
        return ("anchor",) if self.frozen else ()


@coded
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
    """Adam that sends gradients over ``axis`` in one bit per element, and at most steps after ``var_freeze_step`` nothing.

    `ZeroOneSteps` says which step sends what. Until the variance is frozen, gradients are averaged at every step: in full
    precision at the steps that update the variance, and at the others in one bit, for momentum alone. After that each rank
    takes local steps, ``−lr·m/(√v + eps)``, and sums its changes. At some steps these sums, as momentum, are averaged in one
    bit, and all ranks apply the mean to the last parameters that were equal on all ranks.

    Weight decay is decoupled. It is applied only at steps that send, to the last equal parameters, for all steps since:
    ``−Σlr·weight_decay·p``. The paper has no weight decay.

    Between steps that send, ``state.params`` are **rank-local**, and evaluations differ a little between ranks. To evaluate
    equal parameters, do it after a step that sends: ``ZeroOneSteps(...).sent(state.step) is Sent.ONE_BIT`` (skipped steps do
    not count). A checkpoint stores every rank's parameters; a restore on another number of ranks starts from their mean.

    Args:
        var_update_scaler, local_step_scaler, local_step_clipper: see `ZeroOneSteps`.
        axis: the mesh axis whose ranks share the batch and hold the same state.
        scales: "leaf" for one scale per parameter, or the number of elements per scale, a multiple of 8.

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
    scales = scales_of("zero_one_adam", scales)
    steps = ZeroOneSteps(var_freeze_step, var_update_scaler, local_step_scaler, local_step_clipper)
    rate = as_schedule(lr, "zero_one_adam")

    def init(params: Tree, _: Shards) -> ZeroOneAdamState:
        mu, nu, anchor, moved = (tree_map(torch.zeros_like, params) for _ in range(4))
        elapsed, diverged = torch.zeros((), dtype=torch.float64), torch.zeros(())
        return ZeroOneAdamState(torch.zeros(()), mu, nu, torch.zeros(()), anchor, moved, elapsed, diverged)

    def step(
        params: Tree, grads: Tree, state: ZeroOneAdamState, scale: torch.Tensor | None, shards: Shards
    ) -> tuple[ZeroOneAdamState, ParameterChange]:
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
            shards.reset_residuals()  # of gradients; from here on momentum is sent
            state = state._replace(frozen=torch.ones(()))
        size = rate(state.count)
        elapsed = state.elapsed + size

        local = partial(local_step_, lr=size, b1=b1, eps=eps, scale=scale)
        each_tensor(local, grads, state.mu, state.nu, state.moved)
        # With elapsed == 0 no rank has moved, and the mean would be divided by 0.
        if steps.sent(number) is Sent.NOTHING or elapsed == 0:
            return state._replace(elapsed=elapsed, diverged=torch.ones(())), ParameterChange(
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
        return after, ParameterChange(lambda p, anchor: anchor, (state.anchor,), absolute=True)

    def coming(state: ZeroOneAdamState) -> int:
        number = int(state.count) + 1
        if state.frozen and not steps.frozen(number):
            raise ValueError(
                f"zero_one_adam(var_freeze_step={var_freeze_step}): the variance of this state is frozen, after {number - 1} "
                "steps, and ranks may have diverged; give the var_freeze_step that it was trained with"
            )
        return number

    def unreduced(state: ZeroOneAdamState) -> bool:
        return steps.sent(coming(state)) is not Sent.FULL

    owns = Owned("zero_one_adam", axis, OneBit(scales), unreduced)
    last = (
        "zero_one_adam makes parameters equal again that had diverged, and a later transformation in the chain would change "
        "its updates"
    )
    return stepping("zero_one_adam", init, step, Locality.GLOBAL, owns, last=last)
