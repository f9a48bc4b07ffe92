"""Curves for a terminal, in Braille's dots: two across and four down in each character."""

from __future__ import annotations

import math
from collections.abc import Sequence

from shardlib.common.display.svg import short_number

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


def curve_text(points: Sequence[tuple[float, float]], width: int = 60, height: int = 8) -> list[str]:
    """Lines of text: the curve with its largest and smallest value at the left, and the first and last place below."""
    drawn = [(x, y) for x, y in points if math.isfinite(y)]
    if not drawn:
        return ["nothing yet"]
    (first, last), values = (drawn[0][0], drawn[-1][0]), [y for _, y in drawn]
    low, high = min(values), max(values)
    across, down = 2 * width - 1, 4 * height - 1
    cells = [[0] * width for _ in range(height)]
    before: tuple[int, int] | None = None
    for x, y in drawn:
        column = round(across * (x - first) / ((last - first) or 1))
        row = round(down * (1 - (y - low) / ((high - low) or 1)))
        rows = range(min(before[1], row), max(before[1], row) + 1) if before and column - before[0] <= 1 else (row,)
        for each in rows:
            cells[each // 4][column // 2] |= _DOTS[each % 4][column % 2]
        before = column, row
    labels = [short_number(high), *[""] * (height - 2), short_number(low)] if height > 1 else [short_number(high)]
    margin = max(map(len, labels))
    lines = [f"{label:>{margin}} ┤{''.join(chr(0x2800 + cell) for cell in row)}" for label, row in zip(labels, cells)]
    start, end = short_number(first), short_number(last)
    return [*lines, f"{'':>{margin}}  {start}{end:>{max(width - len(start), len(end) + 1)}}"]
