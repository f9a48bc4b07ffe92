"""The methods that are compared on slow links: ways to train the same GPT that send different messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import shardlib as sl
from benchmarks.peers.gpt import GPT, Config, make_loss, params_of, random_batch
from benchmarks.peers.provider import ADAMW
from benchmarks.peers.shardlib import step_of

ADAM, ONEBIT = "Adam", "1-bit Adam, compressed"
_NEVER = 1 << 20  # more steps than any run has
_LOCAL = 4  # 0/1 Adam's steps from one exchange to the next
_LR = 1e-6  # small, as the variance is frozen long before it has settled
_FEW_BITS: dict[str, Any] = {"weights": "int8", "gradients": "int4"}


@dataclass(frozen=True)
class Method:
    """``transform`` and mesh ``shape`` depend on the number of ranks; a cycle of ``steps`` is timed, and its mean taken."""

    name: str
    setting: str
    transform: Callable[[int], Any] = lambda ranks: sl.zero(0)
    shape: Callable[[int], dict[str, int]] = lambda ranks: {"data": ranks}
    optimizer: Callable[[], sl.optim.GradientTransformation] | None = None
    steps: int = 1


def methods() -> list[Method]:
    return [
        Method(ADAM, "`adamw`, stage 0, fp32 gradients"),
        Method("1-bit Adam, warm-up", "`onebit_adam`, before its freeze", optimizer=lambda: _onebit_adam(_NEVER)),
        Method(ONEBIT, "`onebit_adam`, after its freeze", optimizer=lambda: _onebit_adam(1)),
        Method(
            "0/1 Adam",
            f"`zero_one_adam`, variance frozen, the mean over a cycle: {_LOCAL} steps, one of which sends",
            optimizer=_zero_one_adam,
            steps=_LOCAL,
        ),
        Method("ZeRO-3", "`zero(3)`, `adamw`", lambda ranks: sl.zero(3)),
        Method(
            "ZeRO++", "`zero(3)`, int8 weights, int4 gradients; four ranks as 2 × 2, `hierarchical`", _zeropp, _nodes
        ),
    ]


class Run:
    """A method on this rank; calling it trains for one cycle."""

    def __init__(self, method: Method, config: Config, ranks: int) -> None:
        self._steps, self._config, self._taken = method.steps, config, 0
        self._mesh = sl.make_mesh(**method.shape(ranks))
        params = sl.shard(params_of(GPT(config)), self._mesh, method.transform(ranks))
        self._step = step_of(make_loss(config), params, method.optimizer and method.optimizer())

    def __call__(self, _: int) -> None:
        for _ in range(self._steps):
            self._step(random_batch(self._config, self._taken * self._mesh.size + self._mesh.rank))
            self._taken += 1

    def sent(self) -> int:
        """Payload bytes that this rank has sent since the last call, on all axes."""
        payload = sum(self._mesh.traffic.payload.values())
        self._mesh.traffic.reset()
        return payload


def _onebit_adam(freeze_step: int) -> sl.optim.GradientTransformation:
    return sl.optim.onebit_adam(_LR, freeze_step, *ADAMW["betas"], ADAMW["eps"], ADAMW["weight_decay"])


def _zero_one_adam() -> sl.optim.GradientTransformation:
    interval = {"local_step_scaler": 1, "local_step_clipper": _LOCAL}
    return sl.optim.zero_one_adam(_LR, 1, *ADAMW["betas"], ADAMW["eps"], ADAMW["weight_decay"], **interval)


def _nodes(ranks: int) -> dict[str, int]:
    return {"data": 2} if ranks == 2 else {"node": 2, "local": ranks // 2}


def _zeropp(ranks: int) -> Any:
    axes = list(_nodes(ranks))
    transforms = [
        transform for axis in axes for transform in (sl.zero(3, axis=axis), sl.quantize(axis=axis, **_FEW_BITS))
    ]
    return sl.chain(*transforms, *([sl.hierarchical(axes[1])] if len(axes) > 1 else []))
