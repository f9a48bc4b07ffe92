"""Tables, counts and sizes as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(header: Sequence[str], rows: Iterable[Sequence[str]], right: int = 0) -> str:
    """A table with aligned columns, the last ``right`` of them aligned to the right."""
    lines = [tuple(header), *(tuple(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    left = len(header) - right

    def line(cells: Sequence[str]) -> str:
        padded = [c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
        return "  ".join(padded).rstrip()

    return "\n".join([line(lines[0]), "  ".join("─" * width for width in widths), *map(line, lines[1:])])


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
