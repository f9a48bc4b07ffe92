"""Records of a kernel's arguments, NamedTuples, possibly nested, and the flat arguments of an operator in their place."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, get_type_hints


class RecordLayout(NamedTuple):
    """How the arguments of an operator form the records of its function.

    Attributes:
        parameters: of the operator.
        records: (first argument, number of fields, record class), the last first, and nested records before those that
            hold them.
        returned: the function's return annotation.
    """

    parameters: list[inspect.Parameter]
    records: list[tuple[int, int, Any]]
    returned: Any

    def spread(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, whose first parameters have this layout, as a function of the operator's arguments."""
        if not self.records:
            return function
        # This runs in every call of a kernel: tuple.__new__ is faster than a record's own constructor.
        makers = [
            (slice(first, first + count), partial(tuple.__new__, record)) for first, count, record in self.records
        ]

        def call(*arguments: Any) -> Any:
            values = list(arguments)
            for fields, make in makers:
                values[fields] = (make(values[fields]),)
            return function(*values)

        call.__signature__ = inspect.Signature(self.parameters, return_annotation=self.returned)  # type: ignore[attr-defined]
        return call


def layout_of(function: Callable[..., Any]) -> RecordLayout:
    """The layout that the annotations of ``function`` give; every parameter must have one."""
    hints = get_type_hints(function)
    returned = hints.pop("return", None)
    return RecordLayout(*_parameters_and_records(hints, 0), returned)


def _parameters_and_records(
    hints: Mapping[str, Any], start: int
) -> tuple[list[inspect.Parameter], list[tuple[int, int, Any]]]:
    parameters: list[inspect.Parameter] = []
    records: list[tuple[int, int, Any]] = []
    for name, kind in hints.items():
        if hasattr(kind, "_fields"):
            first = start + len(parameters)
            fields, nested = _parameters_and_records(get_type_hints(kind), first)
            parameters += fields
            records = [*nested, (first, len(kind._fields), kind), *records]
        else:
            parameters.append(inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=kind))
    return parameters, records
