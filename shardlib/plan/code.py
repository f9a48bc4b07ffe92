"""Transforms as code: the call of a public function that makes a transform again, with options that are not defaults."""

from __future__ import annotations

import math
import re
import sys
from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from functools import partial
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, NamedTuple

from shardlib.collectives.styles.base import LayerStyle
from shardlib.plan.tables import shortened
from shardlib.plan.transform import Transform

_AXES = ("axis", "replicate")  # arguments that name an axis
_NAME = 160  # characters of a name


class CodeCall(NamedTuple):
    """A call of a public function.

    Attributes:
        function: found in the namespace ``sl`` or ``sl.optim`` by its name.
        arguments: all of its arguments, by name.
    """

    function: Callable[..., Any]
    arguments: Mapping[str, Any]

    def __str__(self) -> str:
        """The code, without the namespace: the first argument and required ones by position, the others by name."""
        shown: list[str] = []
        for number, (name, parameter) in enumerate(signature(self.function).parameters.items()):
            value, required = self.arguments[name], parameter.default is Parameter.empty
            if parameter.kind is Parameter.VAR_POSITIONAL:
                shown += map(code_of, value)
            elif parameter.kind is Parameter.VAR_KEYWORD:
                shown += (f"{option}={code_of(given)}" for option, given in value.items())
            elif required or not _equal(value, parameter.default):
                by_position = (required or number == 0) and parameter.kind is not Parameter.KEYWORD_ONLY
                shown.append(code_of(value) if by_position else f"{name}={code_of(value)}")
        return f"{self.function.__name__}({', '.join(shown)})"


@dataclass(frozen=True, repr=False)
class CodedTransform(Transform):
    """A transform that a public function makes. Its repr is code that makes an equal one, where ``sl`` is shardlib."""

    @property
    @abstractmethod
    def call(self) -> CodeCall:
        """The call that makes the transform."""

    @property
    def name(self) -> str:
        return shortened(str(self.call), _NAME)  # rules and schedules may be pages

    def over(self, axis: str, other: str) -> str:
        function, arguments = self.call
        moved = {name: _moved(arguments[name], axis, other) for name in _AXES if name in arguments}
        return str(CodeCall(function, {**arguments, **moved}))

    def __repr__(self) -> str:
        return f"sl.{self.call}"


def _moved(axes: Any, axis: str, other: str) -> Any:
    """An argument of one or several axes, with another one in the place of ``axis``."""
    return (
        tuple(_moved(each, axis, other) for each in axes)
        if isinstance(axes, tuple)
        else other
        if axes == axis
        else axes
    )


def one_or_list(values: tuple[str, ...]) -> Any:
    """An argument of one or several texts, as it is written: one alone, several as a list."""
    return values if not values else values[0] if len(values) == 1 else list(values)


def code_of(value: Any) -> str:
    """A value as code. Functions, classes and values of dataclasses are written with the module that they are in."""
    if isinstance(value, Enum):
        return f"{_named(type(value))}.{value.name}"
    if isinstance(value, (list, tuple)):
        items = [code_of(item) for item in value]
        if hasattr(value, "_fields"):
            return f"{_named(type(value))}({', '.join(items)})"
        return f"[{', '.join(items)}]" if isinstance(value, list) else f"({', '.join(items)}{',' * (len(items) == 1)})"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{code_of(key)}: {code_of(item)}" for key, item in value.items()) + "}"
    if isinstance(value, re.Pattern):  # its repr is cut short
        flags = value.flags & ~re.UNICODE
        return f"re.compile({value.pattern!r}{f', {flags}' if flags else ''})"
    if isinstance(value, Path):
        return f"pathlib.Path({str(value)!r})"
    if isinstance(value, float) and not math.isfinite(value):
        return f"float('{value}')"
    if isinstance(value, LayerStyle):
        return value.rule
    if isinstance(value, partial):
        given = [*map(code_of, value.args), *(f"{name}={code_of(item)}" for name, item in value.keywords.items())]
        return f"functools.partial({', '.join([code_of(value.func), *given])})"
    if is_dataclass(value) and not isinstance(value, type):
        given = [f"{name}={code_of(item)}" for name, item in options_of(value).items()]
        return f"{_named(type(value))}({', '.join(given)})"
    return _named(value) if callable(value) else repr(value)


def options_of(value: Any) -> dict[str, Any]:
    """Field -> value, for the fields of a dataclass's value that make it another than the defaults do."""
    found = {option.name: (getattr(value, option.name), option.default) for option in fields(value) if option.init}
    given = {name: each for name, (each, usual) in found.items() if each != usual}
    for name in [name for name in given if found[name][1] is not MISSING]:
        if _made(type(value), {other: each for other, each in given.items() if other != name}) == value:
            del given[name]  # it follows from the others
    return given


def _made(cls: type, given: Mapping[str, Any]) -> Any:
    """The value of a dataclass with some of its fields; None where they do not go together."""
    with suppress(Exception):  # of a user's class, too
        return cls(**given)
    return None


def _named(value: Any) -> str:
    """A function or class, from the outermost package that shares it: ``sl.LossScale``, ``torch.optim.NAdam``."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if name is None:
        return repr(value)
    if module in (None, "__main__", "builtins"):
        return name
    parts = module.split(".")
    packages = (parts[:length] for length in range(1, len(parts) + 1))
    found = next((p for p in packages if getattr(sys.modules.get(".".join(p)), name, None) is value), parts)
    return ".".join(["sl" if found[0] == "shardlib" else found[0], *found[1:], name])


def _equal(value: Any, default: Any) -> bool:
    return (type(value) is type(default) and value == default) or value is default
