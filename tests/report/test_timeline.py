"""Timelines as text, character for character, and as pictures."""

import re
import sys

import numpy as np
import pytest

from shardlib.report.timeline import draw_timeline, timeline_text
from shardlib.schedules import Costs, gpipe, interleaved_1f1b, one_f_one_b, simulate, zbv, zero_bubble_h1


def rows(timeline, width=120):
    return timeline_text(timeline, width).splitlines()[1:]


def test_text_gives_every_action_its_time():
    assert timeline_text(simulate(one_f_one_b(2, 3))).splitlines() == [
        "1f1b: 2 ranks, 3 micro-batches; makespan 12, bubble 33.3%, at most 2 micro-batches held",
        "r0 F0F1....B0--F2B1--..B2--",
        "r1 ..F0B0--F1B1--F2B2--....",
    ]
    assert rows(simulate(zero_bubble_h1(2, 2))) == ["r0 F0F1..I0W0I1W1", "r1 ..F0I0F1I1W0W1"]


def test_stages_are_named_where_a_rank_has_several_and_there_is_room():
    timeline = simulate(zbv(2, 1))
    assert rows(timeline) == ["r0 0F0......3F03I03W0......0I00W0", "r1 ...1F02F0......2I02W01I01W0..."]
    assert rows(timeline, 24) == ["r0 F0....F0I0W0....I0W0", "r1 ..F0F0....I0W0I0W0.."]


def test_text_keeps_to_its_width():
    timeline = simulate(gpipe(2, 12))
    assert rows(timeline, 39) == ["r0 " + "F" * 12 + "..." + "B" * 24, "r1 ." + "F" * 12 + "B" * 24 + ".."]
    assert all(len(row) == 3 + 20 for row in rows(timeline, 20))


@pytest.mark.parametrize("costs", [Costs(1.3, 0.7, 0.9), Costs((1, 2, 3), 0.5, 0, 0.25)])
def test_names_stay_whole_whatever_the_durations(costs):
    timeline = simulate(one_f_one_b(3, 11), costs)
    for rank, row in enumerate(rows(timeline, 500)):
        names = [f"{action.kind}{action.microbatch}" for action in timeline.schedule.orders[rank]]
        assert re.findall(r"[FB]\d+", row) == names


def pixels_of(path) -> np.ndarray:
    """Height × width × three channels, 0 to 255."""
    from matplotlib.image import imread

    return (imread(path)[..., :3] * 255).round().astype(int)


def shows(pixels: np.ndarray, colour: str, pale: float) -> bool:
    """Whether a hundred pixels or more have the colour, blended with white, within the rounding of a channel."""
    channels = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)])
    return (np.abs(pixels - (channels + (255 - channels) * pale)) <= 1).all(-1).sum() >= 100


def test_a_picture_shows_kinds_and_chunks(tmp_path):
    pytest.importorskip("matplotlib")
    from shardlib.schedules import picture as drawn

    one, several = tmp_path / "new" / "one.png", tmp_path / "several.png"
    forward, backward, inputs, weights = (drawn.KINDS[kind] for kind in "FBIW")
    draw_timeline(simulate(interleaved_1f1b(2, 4)), one)
    picture = pixels_of(one)
    for pale in (0, drawn.PALE):  # either chunk
        assert shows(picture, forward, pale) and shows(picture, backward, pale)
        assert not shows(picture, inputs, pale) and not shows(picture, weights, pale)  # nothing is split here

    draw_timeline([simulate(gpipe(2, 4)), simulate(zbv(2, 4))], several)
    both = pixels_of(several)
    for colour in (forward, inputs, weights):
        assert shows(both, colour, 0) and shows(both, colour, drawn.PALE)
    assert shows(both, backward, drawn.PALE)  # only GPipe has whole backwards, and one stage a rank
    assert both.shape[0] > picture.shape[0] and both.shape[1] == picture.shape[1]


def test_what_cannot_be_drawn(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match="no timelines to draw"):
        draw_timeline([], tmp_path / "none.png")
    for name in ("figure", "colors", "patches"):
        monkeypatch.setitem(sys.modules, f"matplotlib.{name}", None)
    with pytest.raises(ImportError, match=r"pip install 'shardlib\[notebooks\]'"):
        draw_timeline(simulate(gpipe(1, 1)), tmp_path / "none.png")
