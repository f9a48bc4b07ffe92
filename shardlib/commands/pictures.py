"""Pictures that commands write beside their results."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from shardlib.common.optional import MissingPackage


def draw(say: Callable[[str], None], name: str, path: Path, drawn: Callable[[], None]) -> None:
    """Calls ``drawn``, which writes a picture to ``path``, and prints the path, or which package is missing.

    A missing package is no error here: the command has its results by then.
    """
    try:
        drawn()
    except MissingPackage as missing:
        say(f"no {name}: {missing}")
    else:
        say(f"{name}: {path}")
