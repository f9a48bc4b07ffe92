"""Loss scaling for fp16, static or dynamic with DeepSpeed's documented defaults."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class LossScale:
    """A factor, ``value``, by which the loss is multiplied before backward, and the rule by which the factor changes.

    After ``window`` finite steps in a row the scale grows by ``factor``. A step with non-finite gradients is
    skipped and uses up one of ``hysteresis`` tolerances; when none is left the scale shrinks by ``factor``, not
    below ``minimum``. Growth restores all tolerances. A factor of 1 makes the scale static.

    ``finite_steps`` counts the finite steps since the last change, and ``tolerance`` the tolerances left (0 at the start
    stands for ``hysteresis``).

    Raises:
        ValueError: a value out of range.
    """

    value: float = 2.0**16
    factor: float = 2.0
    window: int = 1000
    hysteresis: int = 2
    minimum: float = 1.0
    finite_steps: int = 0
    tolerance: int = 0

    def __post_init__(self) -> None:
        if not (
            0 < self.minimum <= self.value < math.inf and self.factor >= 1 and self.window >= 1 and self.hysteresis >= 1
        ):
            raise ValueError(
                f"{self!r}: value is finite, minimum lies above 0 and not above value, and factor, window and "
                "hysteresis are at least 1"
            )
        if not self.tolerance:
            object.__setattr__(self, "tolerance", self.hysteresis)

    @classmethod
    def static(cls, value: float) -> LossScale:
        """A scale that never changes."""
        return cls(value, factor=1.0, minimum=value)

    def after(self, finite: bool) -> LossScale:
        """The scale for the next step."""
        if finite:
            grown = self.finite_steps + 1 == self.window
            return replace(
                self,
                value=self.value * self.factor if grown else self.value,
                finite_steps=0 if grown else self.finite_steps + 1,
                tolerance=self.hysteresis if grown else self.tolerance,
            )
        if self.tolerance > 1:
            return replace(self, finite_steps=0, tolerance=self.tolerance - 1)
        return self.lower()

    def lower(self) -> LossScale:
        """The next lower scale, if there is one."""
        return replace(self, value=max(self.value / self.factor, self.minimum), finite_steps=0)

    def resumed(self, earlier: LossScale) -> LossScale:
        """This scale's rule, going on from the value and counts of an ``earlier`` scale; a static scale is unchanged."""
        if self.factor == 1:
            return self
        return replace(
            self,
            value=max(earlier.value, self.minimum),
            finite_steps=min(earlier.finite_steps, self.window - 1),
            tolerance=min(earlier.tolerance, self.hysteresis),
        )

    def __str__(self) -> str:
        if self.factor == 1:
            return f"{self.value:g}, static"
        return (
            f"{self.value:g}, dynamic by {self.factor:g} (window {self.window}, hysteresis {self.hysteresis}, minimum "
            f"{self.minimum:g})"
        )
