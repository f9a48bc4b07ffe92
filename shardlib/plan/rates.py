"""Checks of rates and of seconds, by which steps are predicted."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any


def is_rate(value: Any) -> bool:
    """Whether a value is a number per second: above 0, and infinite where there is no limit."""
    return not isinstance(value, bool) and isinstance(value, Real) and float(value) > 0


def is_seconds(value: Any) -> bool:
    """Whether a value is a finite number of seconds, 0 or more."""
    return not isinstance(value, bool) and isinstance(value, Real) and 0 <= float(value) < math.inf


def named(values: dict[str, Any]) -> str:
    """Names and values as text."""
    return ", ".join(f"{name}={value!r}" for name, value in values.items())
