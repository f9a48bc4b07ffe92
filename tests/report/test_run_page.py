"""The page of a run."""

import math

import pytest
from helpers.shown_pages import Page

import shardlib as sl
from shardlib.report import HtmlWriter, Log


def run(path, steps=30, **options):
    """Of steps that take two seconds each."""
    now = 0.0
    writer = HtmlWriter(path, clock=lambda: now, **options)
    with Log(writer, every=0) as log:
        for step in range(1, steps + 1):
            now = 2.0 * step
            log.write(step, {"loss": 5.0 / step, "lr": 0.1 / step, "finite": True, "aux": {"<b>": 1.0}})
            if step % 10 == 0:
                log.write(step, {"validation": {"loss": 6.0 / step}})
    return writer


def test_a_page_stands_by_itself(tmp_path):
    path = tmp_path / "new" / "run.html"
    writer = run(path, title="<A run>", tokens_per_step=100, ranks=4, price=3.0, unit="nats", levels={"2-gram": 1.5})
    writer.compare([("parameters", "1 kB", "1 kB")])
    writer.add("A schedule", sl.schedules.one_f_one_b(2, 2))
    writer.close()
    page = Page(path.read_text())
    texts = set(page.texts)
    assert {"<A run>", "Loss", "Learning rate", "nats", "2-gram: 1.5", "Plan against measured", "A schedule"} <= texts
    assert {"3,000", "0.1667 nats", "0.2000 nats, at step 30", "What it cost", "Environment"} <= texts
    assert {"60.0 s", "0.06667", "0.2, at 3 for a rank's hour"} <= texts  # 4 ranks for a minute
    assert "aux/<b>" in texts and "finite" not in texts
    assert [path.name for path in path.parent.iterdir()] == ["run.html"]


def test_what_is_not_known_is_not_made_up(tmp_path):
    run(tmp_path / "run.html", unknown={"mfu": "no peak"})
    page = Page((tmp_path / "run.html").read_text())
    assert "unknown: no peak" in page.texts and "No price was given, so money is not counted." in page.texts
    assert "price" not in page.texts and "tokens" not in page.texts
    with pytest.raises(ValueError, match="price=-1"):
        HtmlWriter(tmp_path / "run.html", price=-1)


def test_a_page_is_there_while_the_run_goes_on(tmp_path):
    """Also of an interrupted run that went on, without finite losses, and of one that logged nothing."""
    path = tmp_path / "run.html"
    writer = HtmlWriter(path, every=0.0, earlier={"loss": [(1, 9.0), (2, 8.0)]})
    writer.write(3, {"loss": math.nan})
    page = Page(path.read_text())
    assert "training: 9 at step 1" in page.hints and "training (running mean)" in page.texts
    HtmlWriter(path).close()
    assert "Loss" not in Page(path.read_text()).texts


def test_long_curves_stay_small_and_keep_spikes(tmp_path):
    writer = HtmlWriter(tmp_path / "run.html", every=math.inf)
    for step in range(20_000):
        writer.write(step, {"grad_norm": 100.0 if step == 7_777 else 1.0})
    writer.close()
    html = (tmp_path / "run.html").read_text()
    assert len(html) < 60_000
    polyline = html.partition('<polyline points="')[2].partition('"')[0].split()
    heights = [float(point.split(",")[1]) for point in polyline]
    assert len(polyline) <= 402 and min(heights) < 30 < max(heights)
