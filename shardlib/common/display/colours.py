"""Colours that people with any colour vision tell apart: the palette of Okabe and Ito (2008), on light and dark pages."""

from __future__ import annotations

BLUE, ORANGE, GREEN, VERMILLION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
SKY, PURPLE, YELLOW, GREY = "#56B4E9", "#CC79A7", "#F0E442", "#999999"
PALETTE = (BLUE, ORANGE, GREEN, VERMILLION, SKY, PURPLE, YELLOW, GREY)

PHASES = {
    "forward": BLUE,
    "backward": VERMILLION,
    "recompute": ORANGE,
    "optimizer": GREEN,
    "communication": PURPLE,
    "wait": "#CCCCCC",
    "offload": SKY,
    "other": "#777777",
}  # of a step
KINDS = {"F": BLUE, "B": VERMILLION, "I": ORANGE, "W": GREEN}  # of a schedule's actions
ROLES = {
    "parameters": BLUE,
    "gradients": VERMILLION,
    "optimizer": GREEN,
    "residuals": PURPLE,
    "buffers": SKY,
    "live": ORANGE,
}  # of what a rank holds


def mixed(colour: str, white: float) -> str:
    """A colour with a share of white, as "#rrggbb"."""
    return "#" + "".join(f"{round(channel + (255 - channel) * white):02x}" for channel in _channels(colour))


def ink_on(colour: str) -> str:
    """Black or white: what has more contrast on a colour, by WCAG's luminance."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (n / 255 for n in _channels(colour))]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#000000" if (luminance + 0.05) ** 2 > 1.05 * 0.05 else "#ffffff"


def _channels(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)
