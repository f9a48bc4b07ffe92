"""The schedule of what 0/1 Adam sends, as a pure function of the step's number (arXiv 2202.06009, section 4)."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from shardlib.optim.ranges import check, is_step


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
