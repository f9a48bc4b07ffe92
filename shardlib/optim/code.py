"""Gradient transformations and schedules as code: each knows the call of the public function that made it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from inspect import signature
from typing import Any, ParamSpec, TypeVar

from shardlib.plan.code import CodeCall

Given = ParamSpec("Given")
Made = TypeVar("Made")
Code = Callable[[], str]


def call_code(make: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The call ``make(*args, **kwargs)`` as code, with the options that are not defaults."""
    bound = signature(make).bind(*args, **kwargs)
    bound.apply_defaults()
    return str(CodeCall(make, bound.arguments))


def coded(make: Callable[Given, Made]) -> Callable[Given, Made]:
    """``make``, whose gradient transformations print as the call that made them: see `GradientTransformation.code`.

    ``make`` returns a new transformation at each call.
    """

    @functools.wraps(make)
    def called(*args: Given.args, **kwargs: Given.kwargs) -> Made:
        made: Any = make(*args, **kwargs)
        made.code = functools.partial(call_code, called, *args, **kwargs)  # written when it is asked for
        return made

    return called


class CodedSchedule:
    """A schedule that prints as code.

    Attributes:
        schedule: the function of a step.
        code: returns the code.
    """

    schedule: Callable[[Any], Any]

    def __init__(self, schedule: Callable[[Any], Any], code: Code) -> None:
        self.schedule = schedule.schedule if isinstance(schedule, CodedSchedule) else schedule
        self.code = code

    def __call__(self, step: Any) -> Any:
        return self.schedule(step)

    def __repr__(self) -> str:
        return self.code()


def coded_schedule(make: Callable[Given, Callable[[Any], Any]]) -> Callable[Given, Callable[[Any], Any]]:
    """``make``, whose schedules print as the call that made them."""

    @functools.wraps(make)
    def called(*args: Given.args, **kwargs: Given.kwargs) -> CodedSchedule:
        return CodedSchedule(make(*args, **kwargs), functools.partial(call_code, called, *args, **kwargs))

    return called
