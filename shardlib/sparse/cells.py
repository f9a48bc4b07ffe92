"""The blocks of one head of a layout as cells, as text and as a drawing. Rows are queries and columns are keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from shardlib.common.display.colours import BLUE
from shardlib.common.display.panels import Picture
from shardlib.common.display.svg import drawing, element, text

_SHADES = " ░▒▓█"
_SIDE, _LEFT, _TOP, _GAP = 192, 26, 34, 22  # pixels of a head, and what is around it
_STRENGTHS = 4  # of the colour of a cell


def share_of_cells(rows: torch.Tensor, columns: torch.Tensor, size: int, width: int) -> torch.Tensor:
    """The share of computed blocks in each of at most ``width`` × ``width`` cells, fp32 ``[cells, cells]``.

    Args:
        rows, columns: the numbers of the computed blocks, int ``[blocks]`` each.
        size: blocks along a side.
    """
    step = max(1, -(-size // width))
    cells = -(-size // step)
    counts = (rows // step * cells + columns // step).bincount(minlength=cells**2).view(cells, cells)
    # The last cells of a row or column may hold fewer blocks.
    sizes = (size - step * torch.arange(cells)).clamp(max=step)
    return (counts.cpu() / (sizes[:, None] * sizes)).float()


def cells_text(shares: torch.Tensor) -> str:
    """Cells as text, two characters each, the darker the more blocks are computed."""
    shades = (shares * (len(_SHADES) - 1)).ceil().int()
    return "\n".join("".join(2 * _SHADES[shade] for shade in row).rstrip() for row in shades.tolist())


def cells_picture(heads: Mapping[str, torch.Tensor], positions: int, title: str, shown: str) -> Picture:
    """Heads beside each other, the bluer the more blocks of a cell are computed.

    Args:
        positions: along a side.
        shown: what stands for the drawing in a terminal.
    """
    parts = []
    for number, (name, shares) in enumerate(heads.items()):
        left = _LEFT + number * (_SIDE + _GAP)
        cell = _SIDE / max(len(shares), 1)
        strengths = (shares * _STRENGTHS).ceil().int().tolist()
        for strength in range(1, _STRENGTHS + 1):
            runs = "".join(
                f"M{left + start * cell:.1f} {_TOP + row * cell:.1f}h{length * cell:.1f}v{cell:.2f}h-{length * cell:.1f}z"
                for row, line in enumerate(strengths)
                for start, length in _runs(line, strength)
            )
            if runs:
                parts.append(element("path", d=runs, fill=BLUE, fill_opacity=strength / _STRENGTHS))
        parts.append(
            element(
                "rect",
                x=left,
                y=_TOP,
                width=_SIDE,
                height=_SIDE,
                fill="none",
                stroke="currentColor",
                stroke_opacity=0.5,
            )
        )
        parts.append(text(left + _SIDE / 2, 12, name, "middle"))
        parts.append(text(left + _SIDE / 2, _TOP - 6, f"keys 0…{positions - 1} →", "middle"))
    turned = f"rotate(-90 12 {_TOP + _SIDE / 2:.0f})"
    parts.append(text(12, _TOP + _SIDE / 2, "queries ←", "middle", transform=turned))
    width = _LEFT + len(heads) * (_SIDE + _GAP)
    return Picture(drawing(width, _TOP + _SIDE + 8, "".join(parts), title), shown, {})


def _runs(line: Sequence[int], strength: int) -> list[tuple[int, int]]:
    """The starts and lengths of neighbouring cells of one strength."""
    found: list[tuple[int, int]] = []
    for place, value in enumerate(line):
        if value != strength:
            continue
        if found and sum(found[-1]) == place:
            found[-1] = found[-1][0], found[-1][1] + 1
        else:
            found.append((place, 1))
    return found
