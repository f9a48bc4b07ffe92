"""What a step leaves out of a model's layers: whole layers (progressive layer drop), or tokens of layers (random-LTD).

Both are functions of the step's number and key alone, so every rank, micro-batch and repeated run leaves out the same, and a
resumed run needs no state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Integral
from typing import Any

from shardlib.plan.arguments import refused
from shardlib.rng import Key


@dataclass(frozen=True)
class LayerDrop:
    """The schedule of progressive layer drop (arXiv 2010.13369, section 4).

    Attributes:
        theta: the limit θ̄ of the last layer's probability to be kept.
        gamma: how fast it is approached, per step.
        layers: the paths of the layers that may be dropped, in the order in which they run.
    """

    theta: float
    gamma: float
    layers: tuple[str, ...]

    def theta_at(self, step: int) -> float:
        """θ(t) = (1 − θ̄)·exp(−γt) + θ̄."""
        return (1 - self.theta) * math.exp(-self.gamma * step) + self.theta

    def keep(self, step: int) -> dict[str, float]:
        """Path -> the probability that the layer is kept: 1 − (l/L)·(1 − θ(t)), l = 1…L."""
        fall = (1 - self.theta_at(step)) / len(self.layers)
        return {path: 1 - number * fall for number, path in enumerate(self.layers, 1)}

    def share(self, step: int) -> float:
        """The expected share of the layers that a step keeps: 1 − (1 − θ(t))·(L + 1)/2L."""
        return 1 - (1 - self.theta_at(step)) * (len(self.layers) + 1) / (2 * len(self.layers))

    def kept(self, step: int, key: Key) -> dict[str, bool]:
        """Path -> whether the layer is kept at a step, by the step's key; the same for every slot."""
        draws = key.fold_in("progressive_layer_drop")
        return {
            path: draws.fold_in(number).seed < keep * 2**64
            for number, (path, keep) in enumerate(self.keep(step).items())
        }

    def __str__(self) -> str:
        late = 1 - (1 - self.theta) * (len(self.layers) + 1) / (2 * len(self.layers))
        return f"in the end {late:.1%} of {len(self.layers)} layers ({self.layers[0]} … {self.layers[-1]})"


@dataclass(frozen=True)
class TokenDrop:
    """The schedule of random layer-wise token dropping (arXiv 2211.11586, section 3).

    Attributes:
        kept: the number of tokens of each sequence that the middle layers see, or a function of the step.
        ends: how many of the first layers, and of the last, see all tokens.
        layers: the paths of all layers, in the order in which they run.
    """

    kept: int | Callable[[int], int]
    ends: int
    layers: tuple[str, ...]

    def kept_at(self, step: int) -> int:
        """The number of tokens of each sequence that the middle layers see at a step.

        Raises:
            IllegalComposition: the function of the step gives no such number; names both.
        """
        return tokens_at(self.kept, step)

    @property
    def middle(self) -> tuple[str, ...]:
        """The paths of the layers that see some of the tokens."""
        return self.layers[self.ends : len(self.layers) - self.ends]

    def tokens(self, step: int) -> dict[str, int]:
        """Path of a middle layer -> how many tokens of each sequence it sees; of shorter sequences it sees all."""
        return dict.fromkeys(self.middle, self.kept_at(step))

    def layer_tokens(self, step: int, rows: int, length: int) -> int:
        """Tokens that all layers see at a step together, of a batch of ``rows`` sequences."""
        middle = len(self.middle)
        return rows * (min(self.kept_at(step), length) * middle + length * (len(self.layers) - middle))

    def __str__(self) -> str:
        middle = self.middle
        return f"{self.kept_at(0)} tokens at first in {len(middle)} layers ({middle[0]} … {middle[-1]})"


def tokens_at(kept: int | Callable[[int], int], step: int) -> int:
    """The number of tokens that a schedule keeps at a step.

    Raises:
        IllegalComposition: it is no integer of at least 1.
    """
    found: Any = kept(step) if callable(kept) else kept
    if isinstance(found, bool) or not isinstance(found, Integral) or found < 1:
        raise refused(
            "random_ltd", "kept", kept, f"it gives {found!r} at step {step}; use a number of tokens, at least 1"
        )
    return int(found)


@dataclass(frozen=True)
class Visit:
    """What one layer does at one step.

    Attributes:
        keep: the probability with which it was to be kept; None where no layer may be dropped.
        runs: whether it was kept.
        tokens: how many tokens of each sequence it sees; None for all.
        key: draws the tokens, by the row's index in the global batch and the position.
    """

    keep: float | None = None
    runs: bool = True
    tokens: int | None = None
    key: Key | None = None


@dataclass(frozen=True)
class DropPlan:
    """What the layers of a model do at one step, in one micro-batch.

    Attributes:
        visits: path of a layer -> what it does, for all layers.
    """

    visits: Mapping[str, Visit]

    @cached_property
    def dropped(self) -> tuple[str, ...]:
        """The paths of the layers that the step leaves out."""
        return tuple(path for path, visit in self.visits.items() if not visit.runs)

    @property
    def tokens(self) -> tuple[int | None, ...]:
        """How many tokens of each sequence each layer sees; None for all."""
        return tuple(visit.tokens for visit in self.visits.values())

    def drawn_by(self, key: Key) -> DropPlan:
        """The same, with tokens that are drawn by another key of a step."""
        draws = key.fold_in("random_ltd")
        visits = self.visits.items()
        return DropPlan({path: replace(visit, key=draws.fold_in(n)) for n, (path, visit) in enumerate(visits)})

    def leaves_out(self, path: str) -> bool:
        """Whether a leaf belongs to a layer that the step leaves out."""
        return any(path.startswith(f"{layer}/") for layer in self.dropped)


def drop_plan(layer_drop: LayerDrop | None, token_drop: TokenDrop | None, step: int, key: Key) -> DropPlan:
    """What a micro-batch of a step leaves out.

    Args:
        key: of the step, at the slot of the micro-batch.
    """
    keep, kept = ({}, {}) if layer_drop is None else (layer_drop.keep(step), layer_drop.kept(step, key))
    tokens = {} if token_drop is None else token_drop.tokens(step)
    visits = {
        path: Visit(keep.get(path), kept.get(path, True), tokens.get(path))
        for path in layers_of_both(layer_drop, token_drop)
    }
    return DropPlan(visits).drawn_by(key)


def layers_of_both(layer_drop: LayerDrop | None, token_drop: TokenDrop | None) -> tuple[str, ...]:
    """The paths of all layers."""
    return tuple(dict.fromkeys(path for drop in (token_drop, layer_drop) if drop is not None for path in drop.layers))
