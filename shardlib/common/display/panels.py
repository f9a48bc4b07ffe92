"""Panels: parts of what a value shows, each as HTML for a notebook or a report and as rich's text for a terminal.

HTML stands by itself: it has no scripts, and nothing that is fetched. Lines and text take the page's own colour, so that
they can be read on light and dark ones.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType

STYLE = (
    ".sl-view{font:13px/1.45 system-ui,sans-serif;max-width:60em;overflow-x:auto}"
    ".sl-view table{border-collapse:collapse;margin:.4em 0;font-size:12px;font-variant-numeric:tabular-nums}"
    ".sl-view caption{text-align:left;font-weight:600;padding:.2em 0}"
    ".sl-view th,.sl-view td{padding:.15em .7em .15em 0;text-align:left;border-bottom:1px solid rgba(128,128,128,.3)}"
    ".sl-view .sl-n{text-align:right}"
    ".sl-view details{margin:.2em 0 .2em .2em}.sl-view summary{cursor:pointer}"
    ".sl-view details>*:not(summary){margin-left:1.2em}"
    ".sl-view svg{display:block;max-width:100%;height:auto;margin:.4em 0}"
    ".sl-view pre{font-size:11px;line-height:1.3;overflow-x:auto}"
    ".sl-view .sl-legend{font-size:12px}.sl-view .sl-legend span{margin-right:1em;white-space:nowrap}"
    ".sl-view .sl-legend i{display:inline-block;width:.8em;height:.8em;margin-right:.35em;border:1px solid currentColor}"
)


class Panel(ABC):
    """A part of what a value shows."""

    @abstractmethod
    def html(self) -> str: ...

    @abstractmethod
    def rich(self) -> RenderableType: ...


class Shown:
    """A value that a notebook shows as HTML, and rich in a terminal. No ABC, whose `isinstance` is slow."""

    def shown(self) -> Iterable[Panel]:
        """The panels, from the top down."""
        raise NotImplementedError

    def _repr_html_(self) -> str:
        return view(self.shown())

    def __rich__(self) -> RenderableType:
        from rich.console import Group

        return Group(*(panel.rich() for panel in self.shown()))


def view(panels: Iterable[Panel]) -> str:
    """Panels as one piece of HTML with its own style."""
    return f'<div class="sl-view"><style>{STYLE}</style>{"".join(panel.html() for panel in panels)}</div>'


@dataclass(frozen=True)
class Title(Panel):
    """A line above others."""

    text: str
    level: int = 4

    def html(self) -> str:
        return f'<h{self.level} style="margin:.5em 0 .2em">{escape(self.text)}</h{self.level}>'

    def rich(self) -> RenderableType:
        from rich.text import Text

        return Text(self.text, "bold")


@dataclass(frozen=True)
class Paragraph(Panel):
    """Text; ``code`` keeps its lines and columns."""

    text: str
    code: bool = False

    def html(self) -> str:
        return f"<pre>{escape(self.text)}</pre>" if self.code else f'<p style="margin:.3em 0">{escape(self.text)}</p>'

    def rich(self) -> RenderableType:
        from rich.text import Text

        return Text(self.text)


@dataclass(frozen=True)
class Grid(Panel):
    """A table.

    Attributes:
        header: a title for each column.
        rows: cells as text.
        right: how many of the last columns are numbers.
        title: of the table.
        hints: what a notebook shows when the mouse is over a row; none, or one for each row.
        more: rows that are left out.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: int = 0
    title: str = ""
    hints: Sequence[str] = ()
    more: int = 0

    def html(self) -> str:
        numbers = len(self.header) - self.right

        def line(cells: Sequence[str], tag: str, hint: str = "") -> str:
            made = (
                f"<{tag}{' class=' + chr(34) + 'sl-n' + chr(34) if place >= numbers else ''}>{escape(cell)}</{tag}>"
                for place, cell in enumerate(cells)
            )
            return f"<tr{_titled(hint)}>{''.join(made)}</tr>"

        caption = f"<caption>{escape(self.title)}</caption>" if self.title else ""
        body = "".join(line(row, "td", hint) for row, hint in zip(self.rows, self.hints or [""] * len(self.rows)))
        if self.more:
            body += f'<tr><td colspan="{len(self.header)}">… and {self.more:,} more</td></tr>'
        return f"<table>{caption}<thead>{line(self.header, 'th')}</thead><tbody>{body}</tbody></table>"

    def rich(self) -> RenderableType:
        from rich.box import SIMPLE_HEAD
        from rich.table import Table
        from rich.text import Text

        made = Table(box=SIMPLE_HEAD, title=Text(self.title, "bold") if self.title else None, title_justify="left")
        for place, name in enumerate(self.header):
            made.add_column(Text(name), justify="right" if place >= len(self.header) - self.right else "left")
        for row in self.rows:
            made.add_row(*map(Text, row))
        if self.more:
            made.add_row(Text(f"… and {self.more:,} more"))
        return made


@dataclass(frozen=True)
class Fold(Panel):
    """Panels under a line; in a terminal the line alone, unless it is open."""

    line: str
    inside: Sequence[Panel]
    hint: str = ""
    open: bool = False

    def html(self) -> str:
        inside = "".join(panel.html() for panel in self.inside)
        opened = " open" if self.open else ""
        return f"<details{opened}><summary{_titled(self.hint)}>{escape(self.line)}</summary>{inside}</details>"

    def rich(self) -> RenderableType:
        from rich.console import Group
        from rich.padding import Padding
        from rich.text import Text

        line = Text(f"{'▾' if self.open else '▸'} {self.line}")
        return Group(line, Padding(Group(*(b.rich() for b in self.inside)), (0, 0, 0, 2))) if self.open else line


@dataclass(frozen=True)
class Picture(Panel):
    """A drawing.

    Attributes:
        svg: an element of `shardlib.common.display.svg.drawing`.
        text: what stands for it in a terminal.
        legend: name -> colour.
    """

    svg: str
    text: str
    legend: Mapping[str, str]

    def html(self) -> str:
        keys = "".join(
            f'<span><i style="background:{colour}"></i>{escape(name)}</span>' for name, colour in self.legend.items()
        )
        return self.svg + (f'<div class="sl-legend">{keys}</div>' if keys else "")

    def rich(self) -> RenderableType:
        from rich.text import Text

        return Text(self.text, no_wrap=True, overflow="ellipsis")


def _titled(hint: str) -> str:
    return f' title="{escape(hint)}"' if hint else ""
