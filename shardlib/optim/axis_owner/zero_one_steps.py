"""Which steps of 0/1 Adam send what: a pure function of the step's number (arXiv 2202.06009, section 4)."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from shardlib.optim.ranges import check, is_step


class Sent(enum.Enum):
    """What a step sends over the optimizer's axis."""

    FULL = "full precision"
    ONE_BIT = "1 bit"
    NOTHING = "nothing"


@dataclass(frozen=True)
class ZeroOneSteps:
    """When 0/1 Adam sends what.

    Up to the step after ``var_freeze_step`` (so the paper's counts have it) every step that the variance's interval divides
    is in full precision, the others in 1 bit; the interval is 1 and doubles after every ``var_update_scaler`` such steps.
    From then on every step that the local interval divides is in 1 bit, the others send nothing; that interval is 1 and
    doubles after every ``local_step_scaler`` steps, up to ``local_step_clipper``.

    Raises:
        ValueError: one of them is not an integer above 0.
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
        """By step number ``step``, from 1."""
        if not self.frozen(step):
            return Sent.ONE_BIT if step % self._variance_interval(step) else Sent.FULL
        return Sent.NOTHING if step % self._local_interval(step) else Sent.ONE_BIT

    def frozen(self, step: int) -> bool:
        """Whether the variance is frozen at this step."""
        return step > self.var_freeze_step + 1

    def count(self, steps: int) -> Mapping[Sent, int]:
        """How many of the first ``steps`` steps send what."""
        found = dict.fromkeys(Sent, 0)
        for step in range(1, steps + 1):
            found[self.sent(step)] += 1
        return found

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
        # A clipper need not be a power of two; and what is far beyond it need not be computed.
        return min(2 ** min(doublings, self.local_step_clipper.bit_length()), self.local_step_clipper)
