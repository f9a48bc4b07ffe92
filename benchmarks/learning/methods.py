"""The methods whose final losses are compared: optimizers and compressed exchanges, and ablations of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

import shardlib as sl
from shardlib.collectives.codecs.integers import OneBit
from shardlib.models.gpt import GPTConfig
from shardlib.optim import GradientTransformation, Locality
from shardlib.optim.base import Owned
from shardlib.optim.schedules.base import Schedule
from shardlib.tree import tree_map

_B1, _B2 = 0.9, 0.98  # a variance over 50 steps, well before it is frozen
_EPS = 1e-8
_BLOCK = 128  # elements that share a scale, where those of a parameter do not


@dataclass(frozen=True)
class Task:
    """A fixed model and number of steps; ``batch`` is rows over all ranks, ``adam`` and ``lamb`` peak learning rates."""

    config: GPTConfig
    batch: int
    steps: int
    adam: float
    lamb: float

    @property
    def freeze(self) -> int:
        """The step after which variances are frozen."""
        return self.steps // 4

    def rate(self, peak: float) -> Schedule:
        return sl.optim.warmup_cosine_decay_schedule(0.0, peak, self.steps // 10, self.steps)


# Of 0.01, 0.015, 0.02 and 0.03, this is the best rate of LAMB; at 0.03 1-bit LAMB diverges with two of three seeds.
TASK = Task(GPTConfig(vocab=256, layers=2, width=64, heads=4, sequence=32), batch=16, steps=500, adam=1.5e-3, lamb=0.02)
SMALL = Task(GPTConfig(vocab=256, layers=1, width=8, heads=2, sequence=4), batch=2, steps=8, adam=1.5e-3, lamb=0.02)
RANKS = 2


class Method(NamedTuple):
    """``against`` names the method to compare with, None for a reference; an ablation leaves something out of it."""

    name: str
    against: str | None
    optimizer: Callable[[Task], GradientTransformation]
    transform: Any = sl.zero(0)
    ablation: bool = False


def methods() -> list[Method]:
    adam, lamb, onebit_adam, zero_one = "Adam", "LAMB", "1-bit Adam", "0/1 Adam"
    one, four = "onebit(), stage 0", "int4 gradients, stage 2"
    return [
        Method(adam, None, _adam),
        Method(lamb, None, _lamb),
        Method(onebit_adam, adam, _onebit_adam),
        Method("1-bit LAMB", lamb, _onebit_lamb),
        Method(zero_one, adam, _zero_one_adam),
        Method("moments in 8 bits", adam, lambda t: sl.optim.adamw8bit(t.rate(t.adam), _B1, _B2, _EPS)),
        *(Method(f"onebit(), stage {stage}", adam, _adam, sl.chain(sl.zero(stage), sl.onebit())) for stage in range(4)),
        Method("onebit(), stage 2, a scale per 32", adam, _adam, sl.chain(sl.zero(2), sl.onebit(scales=32))),
        *(Method(f"PowerSGD, rank {rank}", adam, _adam, sl.chain(sl.zero(0), sl.powersgd(rank))) for rank in (4, 16)),
        Method("int8 gradients, stage 0", adam, _adam, sl.chain(sl.zero(0), sl.quantize(gradients="int8"))),
        Method("fp8 gradients, stage 0", adam, _adam, sl.chain(sl.zero(0), sl.quantize(gradients="fp8"))),
        Method(four, adam, _adam, sl.chain(sl.zero(2), sl.quantize(gradients="int4"))),
        Method("int8 weights, int4 gradients, stage 3", adam, _adam, _ZEROPP),
        Method("1-bit Adam, no error feedback", onebit_adam, _without_feedback, ablation=True),
        Method("1-bit Adam, variance not frozen", onebit_adam, _unfrozen, ablation=True),
        Method(f"1-bit Adam, a scale per {_BLOCK}", onebit_adam, lambda t: _onebit_adam(t, _BLOCK), ablation=True),
        Method(
            "0/1 Adam, variance intervals from 16 steps on", zero_one, lambda t: _zero_one_adam(t, 16), ablation=True
        ),
        Method("onebit(), stage 0, no error feedback", one, _adam, _onebit(feedback=False), True),
        Method(f"onebit(), stage 0, a scale per {_BLOCK}", one, _adam, _onebit(scales=_BLOCK), True),
        Method("int4 gradients, stage 2, no error feedback", four, _adam, _INT4_ALONE, True),
    ]


_ZEROPP = sl.chain(sl.zero(3), sl.quantize(weights="int8", gradients="int4"))
_INT4_ALONE = sl.chain(sl.zero(2), sl.quantize(gradients="int4", feedback=False))


def _onebit(**options: Any) -> Any:
    return sl.chain(sl.zero(0), sl.onebit(**options))


def _adam(task: Task) -> GradientTransformation:
    return sl.optim.adamw(task.rate(task.adam), _B1, _B2, _EPS)


def _lamb(task: Task) -> GradientTransformation:
    return sl.optim.lamb(task.rate(task.lamb), _B1, _B2)


def _onebit_adam(task: Task, scales: str | int = "leaf") -> GradientTransformation:
    return sl.optim.onebit_adam(task.rate(task.adam), task.freeze, _B1, _B2, _EPS, scales=scales)


def _onebit_lamb(task: Task) -> GradientTransformation:
    return sl.optim.onebit_lamb(task.rate(task.lamb), task.freeze, _B1, _B2)


def _zero_one_adam(task: Task, var_update_scaler: int | None = None) -> GradientTransformation:
    """0/1 Adam, by default with the paper's intervals in proportion to the run, except those of the variance."""
    return sl.optim.zero_one_adam(
        task.rate(task.adam),
        task.freeze,
        _B1,
        _B2,
        _EPS,
        var_update_scaler=var_update_scaler or 2 * task.freeze // 3,
        local_step_scaler=task.steps // 4,
    )


def _without_feedback(task: Task) -> GradientTransformation:
    """1-bit Adam without error feedback."""
    whole = _onebit_adam(task)
    assert whole.owns is not None
    whole.owns = dataclasses.replace(whole.owns, codec=OneBit(feedback=False))
    return whole


class _Moments(NamedTuple):
    steps: torch.Tensor
    mu: Any
    nu: Any


def _unfrozen(task: Task) -> GradientTransformation:
    """1-bit Adam that sends gradients in one bit after the warm-up, with error feedback, and updates both moments."""
    rate = task.rate(task.adam)

    def init(params: Any, _: sl.optim.Shards) -> _Moments:
        return _Moments(torch.zeros(()), tree_map(torch.zeros_like, params), tree_map(torch.zeros_like, params))

    def update(grads: Any, state: _Moments, params: Any, *, shards: sl.optim.Shards) -> tuple[Any, _Moments]:
        size = rate(state.steps)
        if unreduced(state):
            grads = shards.compressed_mean(grads)
        mu = tree_map(lambda m, g: m.lerp(g, 1 - _B1), state.mu, grads)
        nu = tree_map(lambda v, g: v.lerp(g.square(), 1 - _B2), state.nu, grads)
        updates = tree_map(lambda m, v: -size * m / (v.sqrt() + _EPS), mu, nu)
        return updates, _Moments(state.steps + 1, mu, nu)

    def unreduced(state: _Moments) -> bool:
        return int(state.steps) >= task.freeze

    return GradientTransformation(
        init, update, Locality.ELEMENTWISE, owns=Owned("Adam in one bit", "data", OneBit(), unreduced)
    )
