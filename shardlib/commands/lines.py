"""Files of which each line is a record in JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardlib.commands.arguments import WrongArguments


def records_of(file: Path) -> Iterator[tuple[str, Any]]:
    """Each record, and where it stands; empty lines have none. Refuses a line that is no JSON, or no UTF-8."""
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, 1):
            where = f"{file}, line {number}"
            if line.strip():
                try:
                    yield where, json.loads(line)
                except ValueError as error:  # UnicodeDecodeError is one
                    raise WrongArguments(f"{where} is no JSON ({error}): give one record a line") from None
