"""Checks of hyper-parameters, which refuse values out of range when an optimizer is made."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any


def check(what: str, remedy: str, **values: tuple[object, bool]) -> None:
    """Raise one ValueError that names every bad value: name -> (value, whether it is good)."""
    bad = [f"{name}={value!r}" for name, (value, good) in values.items() if not good]
    if bad:
        raise ValueError(f"{what}({', '.join(bad)}): {remedy}")


def check_adam(what: str, b1: float, b2: float, eps: float, weight_decay: float) -> None:
    """Check the hyper-parameters that Adam and its variants share."""
    check(
        what,
        "b1 and b2 are at least 0 and below 1 (usually 0.9 and 0.999), eps is above 0, and weight_decay at least 0",
        b1=(b1, is_share(b1)),
        b2=(b2, is_share(b2)),
        eps=(eps, is_positive(eps)),
        weight_decay=(weight_decay, is_size(weight_decay)),
    )


def is_real(value: Any) -> bool:
    """Whether ``value`` is a real number of Python or NumPy; infinity and NaN are."""
    return not isinstance(value, bool) and isinstance(value, Real)


def is_number(value: Any) -> bool:
    """Whether ``value`` is a finite real number."""
    return is_real(value) and math.isfinite(value)


def is_size(value: Any) -> bool:
    """Whether ``value`` is a number that is at least 0."""
    return is_number(value) and value >= 0


def is_positive(value: Any) -> bool:
    """Whether ``value`` is a number above 0."""
    return is_number(value) and value > 0


def is_share(value: Any) -> bool:
    """Whether ``value`` is a number that is at least 0 and below 1, such as the decay of a running mean."""
    return is_size(value) and value < 1


def is_integer(value: Any) -> bool:
    """Whether ``value`` is an integer of Python or NumPy."""
    return not isinstance(value, bool) and isinstance(value, Integral)


def is_step(value: Any) -> bool:
    """Whether ``value`` is an integer from 1, such as a number of steps."""
    return is_integer(value) and value >= 1


def is_count(value: Any) -> bool:
    """Whether ``value`` is an integer from 0."""
    return is_integer(value) and value >= 0
