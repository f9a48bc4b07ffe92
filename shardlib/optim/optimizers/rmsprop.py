"""RMSProp (Hinton's lecture 6e, 2012), optionally centred (Graves, arXiv 1308.0850)."""

from __future__ import annotations

from typing import NamedTuple

import torch

from shardlib.optim.base import GradientTransformation
from shardlib.optim.checks import check, is_positive, is_share, is_size
from shardlib.optim.code import coded
from shardlib.optim.schedules.base import Schedule, as_schedule
from shardlib.optim.shards import Locality, Shards
from shardlib.optim.stepping import ParameterChange, each, stepping
from shardlib.tree import Tree, tree_map


class RmspropState(NamedTuple):
    """``count``: steps taken (0-d float); ``nu``: running mean of g²; ``mu``: running mean of g, or () if not centred.

    ``trace``: the momentum, or () without momentum.
    """

    count: torch.Tensor  # type: ignore[assignment]  # optax's name, though tuples have a method of it
    nu: Tree
    mu: Tree
    trace: Tree


@coded
def rmsprop(
    lr: float | Schedule,
    decay: float = 0.9,
    eps: float = 1e-8,
    initial_scale: float = 0.0,
    eps_in_sqrt: bool = True,
    centered: bool = False,
    momentum: float | None = None,
    nesterov: bool = False,
    bias_correction: bool = False,
) -> GradientTransformation:
    """``ν ← decay·ν + (1−decay)·g²``; update ``−lr·g/√(ν + eps)``. Defaults as optax.rmsprop.

    Args:
        initial_scale: the initial ν.
        eps_in_sqrt: False for ``−lr·g/(√ν + eps)``, as in torch.
        centered: whether to replace ν by ν minus the square of the running mean of g.
        momentum: ``t ← momentum·t + u`` for the update u; the update is then t (nesterov: ``u + momentum·t``).
        bias_correction: whether to correct ν, and the running mean of g, as Adam does.

    Raises:
        ValueError: a hyper-parameter out of range.

    >>> p, g = {"w": torch.tensor([3.0, 4.0])}, {"w": torch.tensor([0.6, -0.8])}
    >>> tx = sl.optim.rmsprop(0.1)
    >>> updates, state = tx.update(g, tx.init(p), p)
    >>> updates["w"]
    tensor([-0.3162,  0.3162])
    """
    check(
        "rmsprop",
        "decay and momentum are at least 0 and below 1 (usually 0.9), eps is above 0, initial_scale at least 0, and nesterov "
        "goes with a momentum",
        decay=(decay, is_share(decay)),
        eps=(eps, is_positive(eps)),
        initial_scale=(initial_scale, is_size(initial_scale)),
        momentum=(momentum, momentum is None or is_share(momentum)),
        nesterov=(nesterov, not nesterov or bool(momentum)),
    )
    rate, carried = as_schedule(lr, "rmsprop"), momentum or 0.0

    def init(params: Tree, _: Shards) -> RmspropState:
        def zeros() -> Tree:
            return tree_map(torch.zeros_like, params)

        nu = tree_map(lambda p: torch.full_like(p, initial_scale), params)
        return RmspropState(torch.zeros(()), nu, zeros() if centered else (), zeros() if carried else ())

    def step(
        params: Tree, grads: Tree, state: RmspropState, scale: torch.Tensor | None, shards: Shards
    ) -> tuple[RmspropState, ParameterChange]:
        size, count = rate(state.count), state.count + 1
        grown = 1 - decay ** count.to(torch.float64) if bias_correction else 1.0

        def direct(g: torch.Tensor, v: torch.Tensor, *means: torch.Tensor) -> None:
            if scale is not None:
                g.mul_(scale)
            v.mul_(decay).addcmul_(g, g, value=1 - decay)
            spread = v / grown
            for m in means:
                m.lerp_(g, 1 - decay)
                # For a constant gradient the variance is 0 but for rounding, which may make it negative.
                spread.sub_((m / grown).square()).clamp_(min=0)
            g.mul_(-size)
            g.div_(spread.add_(eps).sqrt_() if eps_in_sqrt else spread.sqrt_().add_(eps))

        def carry(p: torch.Tensor, u: torch.Tensor, *traces: torch.Tensor) -> torch.Tensor:
            for trace in traces:
                trace.mul_(carried).add_(u)
                u = u.add_(trace, alpha=carried) if nesterov else trace.clone()
            return u

        each(direct, grads, state.nu, *([state.mu] if centered else []))
        return state._replace(count=count), ParameterChange(carry, (grads, *([state.trace] if carried else [])))

    return stepping("rmsprop", init, step, Locality.ELEMENTWISE)
