"""The pictures that commands leave beside their results."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from shardlib.optional import MissingPackage


def draw(say: Callable[[str], None], name: str, path: Path, drawn: Callable[[], None]) -> None:
    """Say where a picture is that ``drawn`` writes to ``path``; or, in a line, what is missing to draw it.

    The results are there by then, and no reason to fail.
    """
    try:
        drawn()
    except MissingPackage as missing:
        say(f"no {name}: {missing}")
    else:
        say(f"{name}: {path}")
