"""Calls of the library's public functions as values: the code of a call, and what it makes."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Call:
    """A call of a public function, such as ``Call("optim.adamw", (3e-4,), {"weight_decay": 0.1})``.

    Arguments may be calls, `Variable`s and `Verbatim`s, and lists, tuples and dictionaries of these.
    """

    function: str | Call
    args: tuple[Any, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        given = [*map(code, self.args), *(f"{name}={code(value)}" for name, value in self.options.items())]
        return f"{self.callee}({', '.join(given)})"

    @property
    def callee(self) -> str:
        """The code of what is called."""
        return f"sl.{self.function}" if isinstance(self.function, str) else str(self.function)

    def make(self, names: Mapping[str, Any]) -> Any:
        """What the call returns, where ``names`` has the values of `Variable`s."""
        function = Variable(f"sl.{self.function}") if isinstance(self.function, str) else self.function
        return make(function, names)(
            *(make(value, names) for value in self.args),
            **{name: make(value, names) for name, value in self.options.items()},
        )


class Variable(NamedTuple):
    """A variable of the code, an attribute of one ("cycle.lr"), or a public name ("sl.optim.adamw")."""

    path: str


class Verbatim(NamedTuple):
    """A value whose code is not its repr, as a lambda's."""

    text: str
    value: Any


class Lambda(NamedTuple):
    """A function of what only the script knows: ``Lambda("length", Call("sparse.bigbird", (Variable("length"),)))``."""

    parameters: str
    body: Any

    def made(self, names: Mapping[str, Any]) -> Callable[..., Any]:
        """The function. Its parameters are names in its body."""
        parameters = [part.split("=")[0].strip() for part in self.parameters.split(",")]
        defaults = {
            name: int(value) for name, _, value in (p.partition("=") for p in self.parameters.split(",")) if value
        }
        defaults = {name.strip(): value for name, value in defaults.items()}

        def function(*args: Any, **options: Any) -> Any:
            return make(self.body, {**names, **defaults, **dict(zip(parameters, args)), **options})

        return function


def code(value: Any) -> str:
    """A value as code, where ``sl`` is shardlib."""
    match value:
        case Call():
            return str(value)
        case Variable(path):
            return path
        case Lambda(parameters, body):
            return f"lambda {parameters}: {code(body)}"
        case Verbatim(text, _):
            return text
        case list():
            return f"[{', '.join(map(code, value))}]"
        case tuple():
            return f"({', '.join(map(code, value))}{',' * (len(value) == 1)})"
        case Mapping():
            return "{" + ", ".join(f"{code(key)}: {code(item)}" for key, item in value.items()) + "}"
    return repr(value)


def make(value: Any, names: Mapping[str, Any]) -> Any:
    """The value that `code` stands for."""
    match value:
        case Call():
            return value.make(names)
        case Variable(path):
            first, *rest = path.split(".")
            found = importlib.import_module("shardlib") if first == "sl" else names[first]
            for part in rest:
                found = getattr(found, part)
            return found
        case Lambda():
            return value.made(names)
        case Verbatim(_, given):
            return given
        case list():
            return [make(item, names) for item in value]
        case tuple():
            return tuple(make(item, names) for item in value)
        case Mapping():
            return {key: make(item, names) for key, item in value.items()}
    return value
