"""Dynamic loss scaling for fp16, with DeepSpeed's documented defaults."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class LossScale:
    """The loss is multiplied by ``value`` before backward.

    After ``window`` finite steps in a row the scale grows by ``factor``. A step with non-finite gradients is
    skipped and uses up one of ``hysteresis`` tolerances; when none is left the scale shrinks by ``factor``, not
    below ``minimum``.
    """

    value: float = 2.0**16
    factor: float = 2.0
    window: int = 1000
    hysteresis: int = 2
    minimum: float = 1.0
    finite_steps: int = 0
    tolerance: int = 2

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
        return replace(self, value=max(self.value / self.factor, self.minimum), finite_steps=0)
