"""Hyper-parameters that cannot be meant are refused when an optimizer is made."""

from __future__ import annotations


def check(what: str, remedy: str, **wrong: tuple[object, bool]) -> None:
    """Raise ValueError for every value that is not ``(value, whether it will do)``'s second."""
    bad = [f"{name}={value!r}" for name, (value, good) in wrong.items() if not good]
    if bad:
        raise ValueError(f"{what}({', '.join(bad)}): {remedy}")


def check_adam(what: str, b1: float, b2: float, eps: float, weight_decay: float) -> None:
    """What all of Adam's kin have in common."""
    check(
        what,
        "b1 and b2 are at least 0 and below 1 (usually 0.9 and 0.999), eps is above 0, and weight_decay at least 0",
        b1=(b1, 0 <= b1 < 1),
        b2=(b2, 0 <= b2 < 1),
        eps=(eps, eps > 0),
        weight_decay=(weight_decay, weight_decay >= 0),
    )


def is_step(value: object) -> bool:
    """Whether it counts steps: an integer from 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
