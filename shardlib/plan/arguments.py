"""Checks of the arguments of transforms: each gives the argument in one form, and refuses wrong ones by name.

NumPy's numbers and texts count as Python's, and become them, so that a transform's code and its equality do not depend on
where an argument came from.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Set
from numbers import Integral, Real
from typing import Any

from shardlib.errors import IllegalComposition
from shardlib.plan.tables import shortened

_SHOWN = 120  # characters of an argument


def refused(function: str, name: str, value: Any, remedy: str) -> IllegalComposition:
    """The error for an argument, which a caller raises."""
    return IllegalComposition(f"{function}({name}={shortened(repr(value), _SHOWN)}): {remedy}")


def integer(function: str, name: str, value: Any, least: int = 1, remedy: str = "use an integer of at least {}") -> int:
    """An argument that is an integer of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise refused(function, name, value, remedy.format(least))
    return int(value)


def number(
    function: str, name: str, value: Any, low: float, high: float, remedy: str = "use a number from {:g} to {:g}"
) -> float:
    """An argument that is a number from ``low`` to ``high``."""
    if isinstance(value, bool) or not isinstance(value, Real) or not low <= float(value) <= high:
        raise refused(function, name, value, remedy.format(low, high))
    return float(value)


def numbers(value: Any) -> tuple[float, ...] | None:
    """An argument of several numbers; None of something else."""
    several = _items(value) if not isinstance(value, str) else None
    if several is None or not all(isinstance(each, Real) and not isinstance(each, bool) for each in several):
        return None
    return tuple(map(float, several))


def flag(function: str, name: str, value: Any) -> bool:
    """An argument that is True or False."""
    if not isinstance(value, bool):
        raise refused(function, name, value, "use True or False")
    return value


def choice(function: str, name: str, value: Any, choices: Collection[str | None]) -> Any:
    """An argument that is one of ``choices``, which are names, and None where it may be left out."""
    if not (value is None or isinstance(value, str)) or value not in choices:
        *most, last = [repr(each) for each in choices if each is not None]
        usable = f"{', '.join(most)} or {last}" if most else last
        raise refused(function, name, value, f"use {usable}{', or leave it out' if None in choices else ''}")
    return value if value is None else str(value)


def axis_of(function: str, name: str, axis: Any) -> str:
    """An argument that names one axis."""
    if not isinstance(axis, str) or not axis:
        raise refused(function, name, axis, "name one axis of the mesh")
    return str(axis)


def axes_of(function: str, axis: Any, most: int | None = None) -> tuple[str, ...]:
    """An argument ``axis`` of one or several names of axes, as a tuple: at most ``most``, each once."""
    axes = (axis,) if isinstance(axis, str) else tuple(axis) if isinstance(axis, (tuple, list)) else ()
    named = all(isinstance(each, str) and each for each in axes)
    if not axes or not named or len(set(axes)) < len(axes) or (most is not None and len(axes) > most):
        several = "several" if most is None else {2: "two"}.get(most, f"up to {most}")
        raise refused(function, "axis", axis, f"name one axis of the mesh, or {several} that differ")
    return tuple(map(str, axes))


def texts(function: str, name: str, value: Any, what: str, least: int = 1) -> tuple[str, ...]:
    """An argument of one or several texts, as a tuple. One alone is a sequence too, of its letters. Sets are sorted.

    Args:
        what: what a text is: "glob of parameters".
        least: how many there must be.
    """
    several = [value] if isinstance(value, str) else _items(value)
    if several is None or len(several) < least or not all(isinstance(each, str) and each for each in several):
        raise refused(function, name, value, f"give one {what}, a text, or a list of them")
    return tuple(map(str, sorted(several) if isinstance(value, Set) else several))


def _items(value: Any) -> list[Any] | None:
    """What is in a list and the like; None of what is none."""
    if isinstance(value, (bytes, Mapping)) or not isinstance(value, Iterable):
        return None
    try:
        return list(value)
    except TypeError:  # an array or a tensor without dimensions
        return None


GLOB = "glob of parameters"
