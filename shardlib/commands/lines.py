"""Files of which each line is a document, or a record in JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardlib.commands.arguments import WrongArguments


def lines_of(file: Path) -> Iterator[tuple[int, str]]:
    """Number, from 1, and text of each line that is not empty."""
    with open(file, encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            if text := line.rstrip("\n"):
                yield number, text


def records_of(file: Path) -> Iterator[tuple[str, Any]]:
    """Each record, and where it stands. Refuses a line that is no JSON."""
    for number, line in lines_of(file):
        where = f"{file}, line {number}"
        try:
            yield where, json.loads(line)
        except ValueError as error:
            raise WrongArguments(f"{where} is no JSON ({error}): give one record a line") from None
