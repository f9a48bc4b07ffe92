"""Loss scaling for fp16, static or dynamic with DeepSpeed's documented defaults."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class LossScale:
    """The loss is multiplied by ``value`` before backward.

    After ``window`` finite steps in a row the scale grows by ``factor``. A step with non-finite gradients is
    skipped and uses up one of ``hysteresis`` tolerances; when none is left the scale shrinks by ``factor``, not
    below ``minimum``. Growing brings the tolerances back. A factor of 1 is a static scale.

    ``finite_steps`` and ``tolerance`` (0: as many as ``hysteresis``) are where it stands.

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
        if not (0 < self.minimum <= self.value and self.factor >= 1 and self.window >= 1 and self.hysteresis >= 1):
            raise ValueError(
                f"{self!r}: minimum lies above 0 and not above value, and factor, window and hysteresis are at least 1"
            )
        if not self.tolerance:
            object.__setattr__(self, "tolerance", self.hysteresis)

    @classmethod
    def static(cls, value: float) -> LossScale:
        """A scale that stays as it is."""
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
        return replace(self, value=max(self.value / self.factor, self.minimum), finite_steps=0)

    def going_on(self, was: LossScale) -> LossScale:
        """By its own factor, window, hysteresis and minimum from where another scale stood; a static one as it is."""
        if self.factor == 1:
            return self
        return replace(
            self,
            value=max(was.value, self.minimum),
            finite_steps=min(was.finite_steps, self.window - 1),
            tolerance=min(was.tolerance, self.hysteresis),
        )

    def __str__(self) -> str:
        if self.factor == 1:
            return f"{self.value:g}, static"
        return (
            f"{self.value:g}, dynamic by {self.factor:g} (window {self.window}, hysteresis {self.hysteresis}, minimum "
            f"{self.minimum:g})"
        )
