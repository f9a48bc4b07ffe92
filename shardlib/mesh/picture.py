"""The drawing of a mesh: its ranks as a grid, whose columns are the last axis and whose rows are the one before."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

from shardlib.common.display.colours import BLUE, SKY, ink_on
from shardlib.common.display.panels import Picture
from shardlib.common.display.svg import box, drawing, text

_COLUMNS, _ROWS, _PANELS = 16, 16, 8  # that are drawn; what is left out is counted
_HIGH, _GAP = 22, 3


def mesh_picture(shape: Mapping[str, int], rank: int | None = None) -> Picture:
    """The ranks of a mesh of these axes and sizes, with one of them marked. Further axes than two are panels."""
    sizes = shape or {"": 1}
    *outer, down, across = [("", 1), *sizes.items()] if len(sizes) == 1 else list(sizes.items())
    count = math.prod(sizes.values())
    columns, rows = min(across[1], _COLUMNS), min(down[1], _ROWS)
    wide = 14.0 + 8 * len(str(count))
    step, high = wide + _GAP, _HIGH + _GAP
    left, top = (14.0 + 7 * len(f"{down[0]}={rows}") if down[0] else 4.0), 22.0
    columns_named = f"{across[0]} = 0…{across[1] - 1} →" if across[1] > 1 else f"{across[0]} = 0"
    panels = list(itertools.islice(itertools.product(*(range(size) for _, size in outer)), _PANELS))
    drawn, lines, y = [], [], 0.0
    for panel, coords in enumerate(panels):
        place, first = dict(zip((axis for axis, _ in outer), coords)), panel * down[1] * across[1]
        title = ", ".join(f"{axis}={number}" for axis, number in place.items())
        drawn.append(text(left, y + 13, f"{title + ':  ' if title else ''}{columns_named}"))
        lines.append(f"{title + ': ' if title else ''}{columns_named}")
        for row in range(rows):
            name = f"{down[0]}={row}" if down[0] else ""
            drawn.append(text(left - 8, y + top + row * high + 15, name, "end"))
            cells = []
            for column in range(columns):
                number = first + row * across[1] + column
                here = {**place, **({down[0]: row} if down[0] else {}), across[0]: column}
                hint = f"rank {number}: " + ", ".join(f"{axis}={at}" for axis, at in here.items())
                mine = number == rank
                colour = BLUE if mine else SKY
                x, at = left + column * step, y + top + row * high
                drawn.append(box(x, at, wide, _HIGH, colour, hint, rx=3, fill_opacity=1 if mine else 0.35))
                ink = {"fill": ink_on(BLUE)} if mine else {}
                drawn.append(text(x + wide / 2, at + 15, str(number), "middle", pointer_events="none", **ink))
                cells.append(f"[{number}]" if mine else f" {number} ")
            if columns < across[1]:
                drawn.append(text(left + columns * step + 4, y + top + row * high + 15, "…"))
                cells.append("…")
            width = len(str(count)) + 2
            lines.append(f"{name:<{len(down[0]) + 4}}" + "".join(cell.rjust(width) for cell in cells))
        y += top + rows * high + 8
    shown = len(panels) * rows * columns
    if shown < count:
        drawn.append(text(left, y + 10, f"… and {count - shown:,} more ranks"))
        lines.append(f"… and {count - shown:,} more ranks")
        y += 16
    across_all = max(left + columns * step + 24, left + 7.0 * max(map(len, lines[:1])))
    return Picture(drawing(across_all, y, "".join(drawn), f"mesh of {count:,} ranks"), "\n".join(lines), {})
