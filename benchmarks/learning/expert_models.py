"""The models whose learning is compared: a dense GPT, and GPTs with experts that do the same work per token."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import shardlib as sl
from shardlib.models import gpt
from shardlib.models.gpt import GPTConfig
from shardlib.tree import leaves_of

EARLY = 0.6  # of the dense model's steps: the share in which experts are to reach its loss
FOLLOWS = 0.6  # of a student's steps: then it leaves its teacher
TUNED_ON = 3  # the seed of the grids, which is not compared


@dataclass(frozen=True)
class Task:
    """A dense GPT and how it and the others are trained: rows of a batch, steps, and steps between evaluations.

    ``rates`` are grids of peak learning rates, by factors of 2: of `DENSE`, and of `EXPERTS`, whose rate all others have.
    """

    base: GPTConfig
    batch: int
    steps: int
    every: int
    rates: Mapping[str, tuple[float, ...]]


class Model(NamedTuple):
    """A model and how it is trained.

    ``chosen`` is the number of experts of a token, ``steps`` the share of the task's steps. A student follows ``teacher`` for
    the share ``follows`` of its steps. An ablation leaves something out, or has it elsewhere.
    """

    name: str
    config: GPTConfig
    chosen: int = 0
    steps: float = 1.0
    teacher: str | None = None
    follows: float = 0.0
    ablation: bool = False

    @property
    def tuned_as(self) -> str:
        """The model whose rate it has: the rate is searched for one dense model, and in the same way for one with experts."""
        return DENSE if self.config.moe is None else EXPERTS

    @property
    def parameters(self) -> int:
        return gpt.parameters_count(self.config)

    @property
    def met(self) -> int:
        """The number of parameters that a token meets."""
        blocks = gpt.init(self.config, device="meta")["blocks"]
        experts = (leaf for block in blocks if "moe" in block for leaf in leaves_of(block["moe"]["experts"]))
        return self.parameters - sum(leaf[self.chosen :].numel() for leaf in experts)


DENSE, EXPERTS, SOONER, PR_MOE = "dense", "experts", f"experts, {EARLY:g} of the steps", "PR-MoE"
BIAS, FREE, SWITCH = "experts, a bias for balance", "experts, no balance", "experts, one per token"
FIRST, SECOND = "experts in the first half", "experts in the second half"
STUDENT, TO_THE_END, ALONE = "student", "student, to the end", "student, no teacher"


TASK = Task(
    base=GPTConfig(vocab=256, layers=4, width=32, heads=2, sequence=64),
    batch=16,
    steps=2000,
    every=200,
    rates={DENSE: (8e-3, 1.6e-2, 3.2e-2), EXPERTS: (4e-3, 8e-3, 1.6e-2)},  # each with its best one in the middle
)
SMALL = Task(
    base=GPTConfig(vocab=256, layers=4, width=8, heads=2, sequence=4),
    batch=2,
    steps=10,
    every=5,
    rates={DENSE: (3e-3,), EXPERTS: (3e-3,)},
)


def models(task: Task) -> list[Model]:
    """The models to compare, and then ablations.

    An expert is half as wide as the MLP and a token has two; in PR-MoE it has one and the residual expert, which is as wide.
    """
    base, half = task.base, 2 * task.base.width
    one = sl.nn.MoEConfig(sl.nn.routers.switch(), "gelu_tanh")
    two = sl.nn.MoEConfig(sl.nn.routers.top_k(2, renormalise="chosen"), "gelu_tanh")

    def with_two(name: str, *per_layer: int, load: float = 0.01, balance: bool = False, **how: Any) -> Model:
        experts = gpt.Experts(per_layer, two, hidden=half, load=load, balance=balance)
        return Model(name, dataclasses.replace(base, moe=experts), 2, **how)

    def pyramid(name: str, *per_layer: int, **how: Any) -> Model:
        experts = gpt.Experts(per_layer, one, hidden=half, residual=half)
        return Model(name, dataclasses.replace(base, layers=len(per_layer), moe=experts), 1, **how)

    switch = dataclasses.replace(base, moe=gpt.Experts((8,), one))
    return [
        Model(DENSE, base),
        with_two(EXPERTS, 8),
        with_two(SOONER, 8, steps=EARLY),
        with_two(BIAS, 8, load=0.0, balance=True),
        pyramid(PR_MOE, 4, 4, 8, 8),
        pyramid(STUDENT, 4, 8, 8, teacher=PR_MOE, follows=FOLLOWS),
        pyramid(TO_THE_END, 4, 8, 8, teacher=PR_MOE, follows=1.0, ablation=True),
        pyramid(ALONE, 4, 8, 8, ablation=True),
        with_two(FIRST, 8, 8, 0, 0, ablation=True),
        with_two(SECOND, 0, 0, 8, 8, ablation=True),
        with_two(FREE, 8, load=0.0, ablation=True),
        Model(SWITCH, switch, 1, ablation=True),
    ]
