"""Adagrad (Duchi, Hazan and Singer, JMLR 12, 2011)."""

from __future__ import annotations

from typing import NamedTuple

import torch

from shardlib.optim.base import GradientTransformation
from shardlib.optim.checks import check, is_size
from shardlib.optim.code import coded
from shardlib.optim.schedules.base import Schedule, as_schedule
from shardlib.optim.shards import Locality, Shards
from shardlib.optim.stepping import ParameterChange, each, stepping
from shardlib.tree import Tree, tree_map


class AdagradState(NamedTuple):
    """``count``: steps taken (0-d float); ``sum_of_squares``: Σg² over all steps."""

    count: torch.Tensor  # type: ignore[assignment]  # optax's name, though tuples have a method of it
    sum_of_squares: Tree


@coded
def adagrad(lr: float | Schedule, initial_accumulator_value: float = 0.1, eps: float = 1e-7) -> GradientTransformation:
    """``s ← s + g²``; update ``−lr·g/√(s + eps)``, or 0 where s is 0. Defaults as optax.adagrad.

    Raises:
        ValueError: a hyper-parameter out of range.

    >>> p, g = {"w": torch.tensor([3.0, 4.0])}, {"w": torch.tensor([0.6, -0.8])}
    >>> tx = sl.optim.adagrad(0.1)
    >>> updates, state = tx.update(g, tx.init(p), p)
    >>> updates["w"]
    tensor([-0.0885,  0.0930])
    """
    check(
        "adagrad",
        "initial_accumulator_value and eps are at least 0 (usually 0.1 and 1e-7)",
        initial_accumulator_value=(initial_accumulator_value, is_size(initial_accumulator_value)),
        eps=(eps, is_size(eps)),
    )
    rate = as_schedule(lr, "adagrad")

    def init(params: Tree, _: Shards) -> AdagradState:
        return AdagradState(torch.zeros(()), tree_map(lambda p: torch.full_like(p, initial_accumulator_value), params))

    def step(
        params: Tree, grads: Tree, state: AdagradState, scale: torch.Tensor | None, shards: Shards
    ) -> tuple[AdagradState, ParameterChange]:
        size = rate(state.count)

        def direct(g: torch.Tensor, s: torch.Tensor) -> None:
            if scale is not None:
                g.mul_(scale)
            s.addcmul_(g, g)
            g.mul_(torch.where(s == 0, 0.0, (s + eps).rsqrt_()))

        each(direct, grads, state.sum_of_squares)
        return state._replace(count=state.count + 1), ParameterChange(lambda p, u: u.mul_(-size), (grads,))

    return stepping("adagrad", init, step, Locality.ELEMENTWISE)
