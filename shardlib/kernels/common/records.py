"""Records among the parameters of an operator's function.

An operator takes tensors and numbers alone: the fields of a record (a NamedTuple, which may hold others) stand in its place
there, in their order. So a kernel's arguments are written once, as a record that all its functions take.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, get_type_hints


class Layout(NamedTuple):
    """The arguments of an operator that belong together.

    Attributes:
        parameters: the operator's.
        records: first argument, how many, and the record; the last first, and a record's own before it.
        returned: what the function returns, by its annotation.
    """

    parameters: list[inspect.Parameter]
    records: list[tuple[int, int, Any]]
    returned: Any

    def spread(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, whose parameters begin as this layout's do, of the operator's arguments."""
        if not self.records:
            return function
        # Every call of a kernel comes by here: a record is made as the tuple that it is, without its own constructor.
        made = [(slice(first, first + count), partial(tuple.__new__, record)) for first, count, record in self.records]

        def call(*arguments: Any) -> Any:
            values = list(arguments)
            for place, make in made:
                values[place] = (make(values[place]),)
            return function(*values)

        call.__signature__ = inspect.Signature(self.parameters, return_annotation=self.returned)  # type: ignore[attr-defined]
        return call


def layout_of(function: Callable[..., Any]) -> Layout:
    """By the annotations of ``function``, all of whose parameters have one."""
    hints = get_type_hints(function)
    returned = hints.pop("return", None)
    return Layout(*_laid_out(hints, 0), returned)


def _laid_out(hints: Mapping[str, Any], start: int) -> tuple[list[inspect.Parameter], list[tuple[int, int, Any]]]:
    parameters: list[inspect.Parameter] = []
    records: list[tuple[int, int, Any]] = []
    for name, kind in hints.items():
        if hasattr(kind, "_fields"):
            first = start + len(parameters)
            fields, inner = _laid_out(get_type_hints(kind), first)
            parameters += fields
            records = [*inner, (first, len(kind._fields), kind), *records]
        else:
            parameters.append(inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=kind))
    return parameters, records
