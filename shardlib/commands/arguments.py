"""Parsers, and what commands refuse: types of arguments, and what is wrong with several together, as one line."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from shardlib.common.optional import MissingPackage
from shardlib.errors import (
    BatchError,
    IllegalComposition,
    MeshError,
    ScheduleError,
    ShardlibError,
    SpecError,
    TreeError,
)
from shardlib.plan.tables import parse_size

# What plans, meshes and batches refuse.
PLANNED = (BatchError, IllegalComposition, MeshError, ScheduleError, SpecError, TreeError)


class Parser(argparse.ArgumentParser):
    """A parser whose help has the defaults, and whose errors are one line, as commands' own are."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=_Help, **options)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Help with the defaults that are one: not that an option is left out."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        left_out = action.default is None or action.default is False or action.default == []
        return action.help if left_out else super()._get_help_string(action)


class WrongArguments(Exception):
    """What is wrong with a command's arguments, which it prints as a line in place of a traceback."""


@contextmanager
def wrong_arguments(*kinds: type[Exception]) -> Iterator[None]:
    """A block in which such errors become `WrongArguments`; by default all that shardlib raises, `ValueError` and
    `OSError`. It holds no more than what reads arguments, so that errors of other kinds of code keep their tracebacks."""
    refused = kinds or (ShardlibError, ValueError, OSError)
    try:
        yield
    except refused as error:
        raise WrongArguments(str(error)) from error


def positive(text: str) -> int:
    """An argument that counts something of which there is one at least."""
    return _integer(text, 1)


def natural(text: str) -> int:
    """An argument that counts something, or nothing."""
    return _integer(text, 0)


def share(text: str) -> float:
    """An argument from 0 to below 1."""
    return _number(text, lambda number: 0 <= number < 1, "from 0 to below 1")


def above_zero(text: str) -> float:
    """An argument above 0."""
    return _number(text, lambda number: 0 < number < math.inf, "above 0")


def folder(text: str) -> Path:
    """An argument that is a folder, or will be one."""
    if (path := Path(text)).exists() and not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a file: give a folder")
    return path


def size(text: str) -> int:
    """An argument in bytes, such as 24GiB."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _integer(text: str, least: int) -> int:
    if text.isdecimal() and int(text) >= least:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least {least}")


def _number(text: str, fits: Callable[[float], bool], words: str) -> float:
    try:
        if fits(number := float(text)):
            return number
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not a number {words}")


def draw_picture(say: Callable[[str], None], name: str, path: Path, drawn: Callable[[], None]) -> None:
    """Calls ``drawn``, which writes a picture to ``path`` beside a command's results, and prints the path, or which package
    is missing, which is no error by then."""
    try:
        drawn()
    except MissingPackage as missing:
        say(f"no {name}: {missing}")
    else:
        say(f"{name}: {path}")
