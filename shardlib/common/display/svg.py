"""Drawings as SVG: elements, axes, and charts of lines, bars, areas and spans of time. Sizes are pixels."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, NamedTuple

from shardlib.common.display.colours import GREY, ink_on

WIDTH = 720
_TEXT = 11
_LEFT, _RIGHT, _TOP, _BOTTOM = 78, 12, 10, 34
_POINTS = 400  # of a curve; of more the smallest and largest of each stretch are drawn
_HOVERED = 60  # points of a curve that show their numbers

Format = Callable[[float], str]


def element(name: str, content: str = "", **attributes: Any) -> str:
    """An element with escaped attributes; ``content`` is markup. ``stroke_width=1`` becomes ``stroke-width="1"``."""
    given = "".join(f' {key.replace("_", "-")}="{escape(_short(value))}"' for key, value in attributes.items())
    return f"<{name}{given}>{content}</{name}>" if content else f"<{name}{given}/>"


def _short(value: Any) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def drawing(width: float, height: float, content: str, title: str) -> str:
    """A picture, which ``title`` describes for those who do not see it."""
    named = element("title", escape(title))
    return element(
        "svg",
        named + content,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {_short(float(width))} {_short(float(height))}",
        width=float(width),
        height=float(height),
        role="img",
        aria_label=title,
        font_family="system-ui, sans-serif",
        font_size=_TEXT,
        fill="currentColor",
    )


def text(x: float, y: float, content: str, anchor: str = "start", **attributes: Any) -> str:
    """Text whose baseline begins, ends or has its middle at a point."""
    return element("text", escape(content), x=x, y=y, text_anchor=anchor, **attributes)


def box(x: float, y: float, width: float, height: float, colour: str, hint: str = "", **attributes: Any) -> str:
    """A rectangle that shows ``hint`` when the mouse is over it."""
    named = element("title", escape(hint)) if hint else ""
    return element("rect", named, x=x, y=y, width=width, height=height, fill=colour, **attributes)


def short_number(value: float) -> str:
    """A number of an axis."""
    return f"{value:.4g}"


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers from ``low`` to ``high``, at most ``most`` and one."""
    if not high > low:
        return [low]
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


@dataclass(frozen=True)
class Axes:
    """A plane with ticks and the names of its two axes.

    Attributes:
        x, y: the smallest and the largest number of each.
    """

    x: tuple[float, float]
    y: tuple[float, float]
    names: tuple[str, str]
    height: float = 220
    width: float = WIDTH
    formats: tuple[Format, Format] = (short_number, short_number)
    left: float = _LEFT
    right: float = _RIGHT

    def at(self, x: float, y: float) -> tuple[float, float]:
        """The point of two numbers."""
        return self.across(x), self.down(y)

    def across(self, x: float) -> float:
        return self.left + (self.width - self.left - self.right) * (x - self.x[0]) / ((self.x[1] - self.x[0]) or 1)

    def down(self, y: float) -> float:
        inside = self.height - _TOP - _BOTTOM
        return _TOP + inside * (1 - (y - self.y[0]) / ((self.y[1] - self.y[0]) or 1))

    def frame(self) -> str:
        """Lines, ticks and names."""
        bottom, right = self.height - _BOTTOM, self.width - self.right
        parts = []
        for value in ticks(*self.y):
            y = self.down(value)
            parts.append(
                element("line", x1=self.left, x2=right, y1=y, y2=y, stroke="currentColor", stroke_opacity=0.15)
            )
            parts.append(text(self.left - 6, y + 4, self.formats[1](value), "end"))
        for value in ticks(*self.x, 8):
            parts.append(text(self.across(value), bottom + 14, self.formats[0](value), "middle"))
        parts.append(text((self.left + right) / 2, self.height - 4, self.names[0], "middle"))
        middle = (_TOP + bottom) / 2
        turned = f"rotate(-90 12 {_short(middle)})"
        parts.append(text(12.0, middle, self.names[1], "middle", transform=turned))
        return "".join(parts)


class Curve(NamedTuple):
    """A curve of (x, y) points; ``dots`` are drawn where there are few."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: str
    dots: bool = False
    faint: bool = False


def line_chart(
    curves: Iterable[Curve], names: tuple[str, str], title: str, *, levels: Mapping[str, float] | None = None,
    y_format: Format = short_number, height: float = 220,
) -> str:  # fmt: skip
    """Curves over one pair of axes, with a dashed line at each of ``levels``. What is not finite is left out."""
    drawn = [curve._replace(points=[p for p in curve.points if math.isfinite(p[1])]) for curve in curves]
    values = [p for curve in drawn for p in curve.points]
    if not values:
        return drawing(WIDTH, 30, text(8, 20, f"{title}: nothing was measured"), title)
    levels = dict(levels or {})
    heights = [y for _, y in values] + list(levels.values())
    low, high = min(heights), max(heights)
    room = 0.05 * (high - low) or abs(high) * 0.05 or 1.0
    bottom = low - room if low < 0 or low > room else 0.0
    places = [x for x, _ in values]
    named = {f"{name}: {y_format(level)}": level for name, level in levels.items()}
    right = _RIGHT + 6.0 * max(map(len, named), default=0)
    span = (min(places), max(places))
    axes = Axes(span, (bottom, high + room), names, height, formats=(short_number, y_format), right=right)
    parts = [axes.frame()]
    for name, level in named.items():
        y, end = axes.down(level), WIDTH - right
        parts.append(element("line", x1=_LEFT, x2=end, y1=y, y2=y, stroke=GREY, stroke_dasharray="5 4", fill="none"))
        parts.append(text(end + 4, y + 4, name))
    for curve in drawn:
        path = " ".join("{:.1f},{:.1f}".format(*axes.at(*point)) for point in thinned(curve.points))
        look: dict[str, Any] = {"stroke_opacity": 0.35, "stroke_width": 1} if curve.faint else {"stroke_width": 1.8}
        parts.append(element("polyline", points=path, fill="none", stroke=curve.colour, **look))
        if curve.faint:
            continue
        every = max(1, -(-len(curve.points) // _HOVERED))
        for x, y in curve.points[::every]:
            hint = f"{curve.name}: {y_format(y)} at {names[0]} {short_number(x)}"
            across, down = axes.at(x, y)
            seen: dict[str, Any] = {} if curve.dots else {"fill_opacity": 0}
            inside = element("title", escape(hint))
            parts.append(element("circle", inside, cx=across, cy=down, r=3, fill=curve.colour, **seen))
    return drawing(WIDTH, height, "".join(parts), title)


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most `_POINTS` of the points: of each stretch the lowest and the highest, so that spikes stay."""
    if len(points) <= _POINTS:
        return list(points)
    every = -(-2 * len(points) // _POINTS)
    found = []
    for start in range(0, len(points), every):
        stretch = points[start : start + every]
        found += sorted({min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])})
    return found


def bar_chart(
    rows: Mapping[str, Mapping[str, float]], colours: Mapping[str, str], title: str, *, value_format: Format
) -> str:
    """A bar for each row, of parts that have a colour each, under the title; the row's sum stands after it."""
    longest = max((sum(parts.values()) for parts in rows.values()), default=0.0) or 1.0
    left = 16 + 6.2 * max(map(len, rows), default=0)
    left, row = min(left, 260.0), 24
    scale = (WIDTH - left - 90) / longest
    drawn = [text(0, 14, title, font_weight=600)]
    for number, (name, parts) in enumerate(rows.items()):
        x, y = left, 24.0 + row * number
        drawn.append(text(left - 8, y + 14, clipped(name, 38), "end"))
        for part, value in parts.items():
            if value > 0:
                hint = f"{name}, {part}: {value_format(value)}" if part else f"{name}: {value_format(value)}"
                drawn.append(box(x, y, max(value * scale, 0.5), row - 6.0, colours[part], hint))
                x += value * scale
        drawn.append(text(x + 6, y + 14, value_format(sum(parts.values()))))
    return drawing(WIDTH, 26 + row * len(rows), "".join(drawn), title)


def clipped(name: str, most: int) -> str:
    """A name of at most ``most`` characters, with its end, by which paths differ."""
    return name if len(name) <= most else f"…{name[1 - most :]}"


class TimeSpan(NamedTuple):
    """A stretch of time in a colour, with what is written on it and what the mouse shows."""

    start: float
    end: float
    colour: str
    label: str = ""
    hint: str = ""


@dataclass
class SpanChart:
    """Rows of spans over one axis of time.

    Attributes:
        most: spans that are boxes with hints of their own. Of more, those of one colour are one path.
    """

    title: str
    unit: str
    value_format: Format = short_number
    most: int = 1500
    rows: list[tuple[str, Sequence[TimeSpan]]] = field(default_factory=list)

    def svg(self) -> str:
        last = max((span.end for _, spans in self.rows for span in spans), default=0.0) or 1.0
        row, left = (
            22.0 if len(self.rows) <= 16 else 12.0,
            20 + 6.2 * max((len(name) for name, _ in self.rows), default=0),
        )
        height = _TOP + _BOTTOM + row * len(self.rows)
        axes = Axes((0.0, last), (0.0, 1.0), (self.unit, ""), height, left=left)
        parts = []
        for value in ticks(0.0, last, 8):
            x = axes.across(value)
            parts.append(
                element("line", x1=x, x2=x, y1=_TOP, y2=height - _BOTTOM, stroke="currentColor", stroke_opacity=0.15)
            )
            parts.append(text(x, height - _BOTTOM + 14, self.value_format(value), "middle"))
        parts.append(text((left + WIDTH) / 2, height - 4, self.unit, "middle"))
        count = sum(len(spans) for _, spans in self.rows)
        paths: dict[str, list[str]] = {}
        for number, (name, spans) in enumerate(self.rows):
            y = _TOP + row * number
            parts.append(text(left - 8, y + row / 2 + 4, name, "end"))
            for span in spans:
                x, wide = axes.across(span.start), axes.across(span.end) - axes.across(span.start)
                if count > self.most:
                    paths.setdefault(span.colour, []).append(f"M{x:.1f} {y:.0f}h{wide:.1f}v{row - 2:.0f}h-{wide:.1f}z")
                    continue
                edge = {"stroke": "#ffffff", "stroke_width": 0.5} if wide > 3 else {}
                parts.append(box(x, y, max(wide, 0.4), row - 2, span.colour, span.hint, **edge))
                if span.label and wide > 5 + 6.2 * len(span.label):
                    ink = ink_on(span.colour)
                    place = x + wide / 2, y + row / 2 + 3
                    parts.append(text(*place, span.label, "middle", fill=ink, font_size=10, pointer_events="none"))
        parts += [element("path", d="".join(path), fill=colour) for colour, path in paths.items()]
        return drawing(WIDTH, height, "".join(parts), self.title)


def area_chart(
    layers: Mapping[str, Sequence[float]], colours: Mapping[str, str], names: tuple[str, str], title: str, *,
    y_format: Format, levels: Mapping[str, float] | None = None, height: float = 260,
) -> str:  # fmt: skip
    """Layers on top of each other at places 0, 1, …, with a dashed line at each of ``levels``."""
    length = max(map(len, layers.values()), default=0)
    levels = dict(levels or {})
    stacked, below = [], [0.0] * length
    for name, values in layers.items():
        above = [low + value for low, value in zip(below, values)]
        stacked.append((name, below, above))
        below = above
    top = max([*below, *levels.values(), 0.0]) * 1.08 or 1.0
    axes = Axes((0, max(length - 1, 1)), (0, top), names, height, formats=(short_number, y_format))
    parts = []
    for name, low, high in stacked:
        up = thinned(list(enumerate(high)))
        places = [int(x) for x, _ in up]
        points = [*up, *((x, low[x]) for x in reversed(places))]
        path = " ".join("{:.1f},{:.1f}".format(*axes.at(*point)) for point in points)
        hint = f"{name}: at most {y_format(max(layers[name], default=0.0))}"
        parts.append(element("polygon", element("title", escape(hint)), points=path, fill=colours[name]))
    parts.append(axes.frame())
    for name, level in levels.items():
        y = axes.down(level)
        parts.append(
            element("line", x1=_LEFT, x2=WIDTH - _RIGHT, y1=y, y2=y, stroke="currentColor", stroke_dasharray="5 4")
        )
        parts.append(text(_LEFT + 4, y - 4, f"{name}: {y_format(level)}"))
    return drawing(WIDTH, height, "".join(parts), title)
