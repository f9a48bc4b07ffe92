"""Tables, counts and sizes as text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fractions import Fraction
from numbers import Integral
from typing import SupportsIndex

_UNITS = {f"{letter}B": 1000**power for power, letter in enumerate(("", "k", "M", "G", "T"))}
_UNITS |= {f"{letter}iB": 1024**power for power, letter in enumerate(("K", "M", "G", "T"), 1)}


def table(header: Sequence[str], rows: Iterable[Sequence[str]], right: int = 0) -> str:
    """A table with aligned columns, the last ``right`` of them aligned to the right."""
    lines = [tuple(header), *(tuple(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    left = len(header) - right

    def line(cells: Sequence[str]) -> str:
        padded = [c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
        return "  ".join(padded).rstrip()

    return "\n".join([line(lines[0]), "  ".join("─" * width for width in widths), *map(line, lines[1:])])


def shortened(text: str, most: int) -> str:
    """A text of at most ``most`` characters: of a longer one, most of the beginning, and the end."""
    tail = most // 3
    return text if len(text) <= most else f"{text[: most - tail - 3]} … {text[-tail:]}"


def count(number: int) -> str:
    """A number in decimal units, such as "1.5B"."""
    for scale, letter in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= scale:
            return f"{number / scale:.4g}{letter}"
    return str(number)


def size(number: int) -> str:
    """Bytes in decimal units, such as "1.5 GB"."""
    for scale, letter in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if number >= scale:
            return f"{number / scale:.4g} {letter}"
    return f"{number} B"


def parse_size(given: SupportsIndex | str) -> int:
    """Bytes, from a number of bytes or from text such as "24GiB", "24 GB" or "1.5TiB".

    Raises:
        ValueError: neither, or not a whole number of bytes above 0.
    """
    if isinstance(given, str):
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", given.strip())
        unit = _UNITS.get(match[2] or "B") if match else None
        found = Fraction(match[1]) * unit if match and unit else Fraction(0)
    else:
        found = Fraction(int(given) if not isinstance(given, bool) and isinstance(given, Integral) else 0)
    if found <= 0 or found.denominator > 1:
        raise ValueError(
            f"{given!r} is not a size: give a whole number of bytes, or a number with one of {', '.join(_UNITS)}"
        )
    return int(found)
